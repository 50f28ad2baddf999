"""A DeepSpeed configuration in Lemma's words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lemma.core.errors import UserError
from lemma.plugins.foreign_configs.foreign_mapping import AUTO, CLIP, PRECISION, RANKS, SHARD, STEP, Mapped, is_on

STAGES = {0: "none", 1: "optimiser", 2: "gradients", 3: "weights"}
OFFLOAD = "has no counterpart: Lemma keeps everything on the GPUs; take more ranks, or split more with `cluster.shard`"

# Speed, logging and checkpoints: Lemma has its own ways, and results do not depend on them.
TUNING = {
    "steps_per_print", "wall_clock_breakdown", "dump_state", "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer", "prescale_gradients", "gradient_predivide_factor", "disable_allgather",
    "communication_data_type", "flops_profiler", "comms_logger", "aio", "checkpoint", "memory_breakdown",
    "dataloader_drop_last", "torch_autocast", "data_types", "compile",
}  # fmt: skip
NOT_DONE = {
    "amp": "has no counterpart: write `model.precision`",
    "sparse_gradients": "has no counterpart: gradients are dense",
    "sparse_attention": "has no counterpart: attention sees all of a sequence",
    "elasticity": "has no counterpart: a run may be continued with any number of ranks",
    "autotuning": "has no counterpart: `lemma plan` computes what fits",
    "curriculum_learning": "has no counterpart: order the data in the recipe",
    "data_efficiency": "has no counterpart: order and filter the data in the recipe",
    "compression_training": "has no counterpart: weights are trained in full",
    "hybrid_engine": "has no counterpart: the native engine generates with the weights that are trained",
    "tensor_parallel": "has no counterpart: ranks share data, not layers",
    "progressive_layer_drop": "has no counterpart",
    "eigenvalue": "has no counterpart",
    **dict.fromkeys(
        ("tensorboard", "wandb", "csv_monitor", "comet", "monitor_config"),
        "has no effect: loggers are named under `run`",
    ),
}
ZERO_NOT_DONE = {
    "zero_hpz_partition_size": "has no counterpart: weights are split over all ranks",
    "zero_quantized_weights": "has no counterpart: weights travel as they are",
    "zero_quantized_gradients": "has no counterpart: gradients travel as they are",
    "zero_quantized_nontrainable_weights": "has no counterpart: weights travel as they are",
    "mics_shard_size": "has no counterpart: weights are split over all ranks",
}
ADAMS = {"adam", "adamw", "fusedadam", "cpuadam", "deepspeedcpuadam"}


def read_deepspeed(values: Mapping[str, Any], mapped: Mapped) -> None:
    """Map the keys of a DeepSpeed JSON file."""
    taken = {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"}
    taken |= {"zero_optimization", "bf16", "bfloat16", "fp16", "optimizer", "scheduler", "activation_checkpointing"}
    _batch(values, mapped)
    mapped.put(CLIP, mapped.number(values, "gradient_clipping"), "gradient_clipping")
    _zero(mapped.part(values, "zero_optimization"), mapped)
    _precision(values, mapped)
    _optimiser(mapped.part(values, "optimizer"), mapped)
    _schedule(mapped.part(values, "scheduler"), mapped)
    if mapped.part(values, "activation_checkpointing"):
        mapped.say("activation_checkpointing", "only tunes it: `model.checkpointing: true` turns it on")
    mapped.rest(values, taken, TUNING, NOT_DONE)


def _batch(values: Mapping[str, Any], mapped: Mapped) -> None:
    """The examples of a step are micro-batch times accumulation times ranks; packs of tokens make up the rest."""
    whole = mapped.whole(values, "train_batch_size")
    micro = mapped.whole(values, "train_micro_batch_size_per_gpu")
    times = mapped.whole(values, "gradient_accumulation_steps")
    if whole and micro and times:
        if whole % (micro * times):
            raise UserError(
                f"train_batch_size {whole} is no multiple of {micro} x {times}, micro-batch and accumulation",
                file=mapped.file,
                fix=f"write for example {micro * times}",
            )
        mapped.put(RANKS, whole // (micro * times), "train_batch_size")
    put_step(mapped, whole, micro, times)


def put_step(mapped: Mapped, whole: int | None, micro: int | None, times: int | None) -> None:
    """Examples of a step, given or multiplied; a part of the product alone says nothing."""
    ranks = mapped.values.get(RANKS)
    if whole is None and micro and times and ranks:
        whole = micro * times * ranks
    mapped.put(STEP, whole, "train_batch_size")
    if micro:
        mapped.say("train_micro_batch_size_per_gpu", "has no effect by itself: `batch.token_budget` fills a pass")
    if times and whole is None:
        mapped.say("gradient_accumulation_steps", "has no effect by itself: a step takes as many passes as it needs")


def _zero(zero: Mapping[str, Any], mapped: Mapped) -> None:
    if not zero:
        return
    stage = mapped.number(zero, "stage", "zero_optimization.stage")
    if stage is not None:
        if stage not in STAGES:
            raise UserError(f"there is no ZeRO stage {stage}", file=mapped.file, fix="write 0, 1, 2 or 3")
        mapped.put(SHARD, STAGES[int(stage)], "zero_optimization.stage")
    for key in zero:
        name, value = f"zero_optimization.{key}", zero[key]
        if key == "stage" or value in (False, None):
            continue
        if key in ("offload_optimizer", "offload_param"):
            if (value.get("device") if isinstance(value, dict) else value) not in ("none", None):
                mapped.say(name, OFFLOAD)
        elif key in ("cpu_offload", "cpu_offload_params"):
            mapped.say(name, OFFLOAD)
        elif key in ZERO_NOT_DONE:
            if value not in (0, 1, -1) or value is True:
                mapped.say(name, ZERO_NOT_DONE[key])
        else:
            mapped.tuned.append(name)


def _precision(values: Mapping[str, Any], mapped: Mapped) -> None:
    blocks = {
        "bf16": mapped.part(values, "bf16") or mapped.part(values, "bfloat16"),
        "fp16": mapped.part(values, "fp16"),
    }
    switches = {name: mapped.switch(block, "enabled", f"{name}.enabled") for name, block in blocks.items() if block}
    on = [name for name, value in switches.items() if value is True]
    if len(on) == 2:
        raise UserError("bf16 and fp16 are both enabled", file=mapped.file, fix="leave one of them out")
    if on:
        mapped.put(PRECISION, on[0], on[0])
    mapped.autos += [f"{name}.enabled" for name, value in switches.items() if value is None and not on]
    if len(switches) == 2 and all(value is False for value in switches.values()):
        mapped.put(PRECISION, "fp32", "fp16.enabled")
    if blocks["fp16"].get("loss_scale") and "fp16" in on:
        mapped.say("fp16.loss_scale", "has no counterpart: the scale of the loss follows the gradients")


def _optimiser(block: Mapping[str, Any], mapped: Mapped) -> None:
    if not block:
        return
    kind, params = str(block.get("type", "")), mapped.part(block, "params")
    if kind.lower() not in ADAMS or params.get("adam_w_mode") is False:
        mapped.say("optimizer.type", f"{kind} has no counterpart: Lemma's optimiser is AdamW, as `optim` says")
        return
    for key in ("lr", "eps", "weight_decay"):
        name = f"optimizer.params.{key}"
        mapped.put(("optim", key), mapped.number(params, key, name), name)
    betas = params.get("betas")
    if isinstance(betas, list) and len(betas) == 2:
        mapped.put(("optim", "betas"), betas, "optimizer.params.betas")
    elif betas == AUTO:
        mapped.autos.append("optimizer.params.betas")
    known = {"lr", "eps", "weight_decay", "betas", "adam_w_mode", "torch_adam", "fused", "bias_correction"}
    for key in sorted(set(params) - known):
        mapped.unknown(f"optimizer.params.{key}")


def _schedule(block: Mapping[str, Any], mapped: Mapped) -> None:
    if not block:
        return
    kind, params = str(block.get("type", "")), mapped.part(block, "params")
    shapes = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    if kind not in shapes:
        mapped.say("scheduler.type", f"{kind} has no counterpart: write `optim.schedule`")
        return
    mapped.put(("optim", "schedule"), shapes[kind], "scheduler.type")
    for key, word in (("warmup_num_steps", "warmup"), ("warmup_max_lr", "lr"), ("cos_min_ratio", "final_lr")):
        name = f"scheduler.params.{key}"
        mapped.put(("optim", word), mapped.number(params, key, name), name)
    if params.get("warmup_min_lr") not in (None, 0, 0.0, AUTO) or params.get("warmup_min_ratio") not in (None, 0, 0.0):
        mapped.say("scheduler.params", "begins above 0, which has no counterpart: the warm-up begins at 0")
    if kind != "WarmupCosineLR" and params.get("warmup_type", "log") == "log" and params.get("warmup_num_steps"):
        mapped.say("scheduler.params.warmup_type", "log has no counterpart: the warm-up is linear")
    if params.get("total_num_steps") not in (None, AUTO):
        mapped.say(
            "scheduler.params.total_num_steps", "has no effect: a stage's `steps` or `epochs` say how long it is"
        )


def from_accelerate(block: Mapping[str, Any], mapped: Mapped) -> None:
    """The `deepspeed_config` block of an Accelerate file that names no file of DeepSpeed's own."""
    stage = mapped.number(block, "zero_stage", "deepspeed_config.zero_stage")
    if stage is not None and stage not in STAGES:
        raise UserError(f"there is no ZeRO stage {stage}", file=mapped.file, fix="write 0, 1, 2 or 3")
    mapped.put(SHARD, STAGES[2 if stage is None else int(stage)], "deepspeed_config.zero_stage")
    clip = mapped.number(block, "gradient_clipping", "deepspeed_config.gradient_clipping")
    mapped.put(CLIP, clip, "deepspeed_config.gradient_clipping")
    times = mapped.whole(block, "gradient_accumulation_steps", "deepspeed_config.gradient_accumulation_steps")
    put_step(mapped, None, None, times)
    for key in ("offload_optimizer_device", "offload_param_device"):
        if block.get(key) not in (None, "none"):
            mapped.say(f"deepspeed_config.{key}", OFFLOAD)
    tuned = {"zero3_init_flag", "zero3_save_16bit_model", "deepspeed_multinode_launcher", "deepspeed_hostfile"}
    tuned |= {"deepspeed_inclusion_filter", "deepspeed_exclusion_filter", "deepspeed_moe_layer_cls_names"}
    tuned |= {"offload_optimizer_nvme_path", "offload_param_nvme_path"}
    known = {"zero_stage", "gradient_clipping", "gradient_accumulation_steps", "deepspeed_config_file"}
    known |= {"offload_optimizer_device", "offload_param_device"}
    mapped.rest(block, known, tuned, prefix="deepspeed_config.")
    if is_on(block.get("zero3_init_flag")) and stage != 3:
        mapped.tuned.append("deepspeed_config.zero3_init_flag")
