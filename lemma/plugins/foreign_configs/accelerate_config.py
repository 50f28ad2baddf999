"""Accelerate configurations, and the FSDP block that they share with transformers' Trainer, in Lemma's words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lemma.core.errors import UserError
from lemma.plugins.foreign_configs.deepspeed_config import OFFLOAD, from_accelerate
from lemma.plugins.foreign_configs.foreign_mapping import (
    CHECKPOINTING,
    COMPILE,
    DEVICE,
    PRECISION,
    RANKS,
    SHARD,
    Mapped,
    is_on,
)

DATA_PARALLEL = {"NO", "MULTI_GPU", "MULTI_CPU"}
PRECISIONS = {"no": "fp32", "fp16": "fp16", "bf16": "bf16"}
STRATEGIES = {
    "FULL_SHARD": "weights",
    "SHARD_GRAD_OP": "gradients",
    "NO_SHARD": "none",
    "HYBRID_SHARD": "weights",
    "HYBRID_SHARD_ZERO2": "gradients",
}
FSDP_TUNING = {
    "version", "auto_wrap_policy", "transformer_layer_cls_to_wrap", "transformer_cls_names_to_wrap", "min_num_params",
    "backward_prefetch", "backward_prefetch_policy", "forward_prefetch", "limit_all_gathers", "use_orig_params",
    "sync_module_states", "cpu_ram_efficient_loading", "state_dict_type", "activation_checkpointing_offload",
}  # fmt: skip
FSDP_MAPPED = {
    "sharding_strategy", "reshard_after_forward", "offload_params", "cpu_offload", "activation_checkpointing",
}  # fmt: skip
FSDP_NOT_DONE = {
    "xla": "has no counterpart: Lemma computes with torch alone",
    "xla_fsdp_v2": "has no counterpart: Lemma computes with torch alone",
    "xla_fsdp_grad_ckpt": "has no counterpart: write `model.checkpointing: true`",
    "xla_fsdp_settings": "has no counterpart: Lemma computes with torch alone",
    "float8_all_gather": "has no counterpart: weights travel as they are",
    "mixed_precision_policy": "has no counterpart: write `model.precision`",
}
FSDP_KEYS = FSDP_TUNING | FSDP_MAPPED | set(FSDP_NOT_DONE)
ELSEWHERE = {
    "machine_rank", "main_process_ip", "main_process_port", "rdzv_backend", "same_network", "gpu_ids",
    "main_training_function", "enable_cpu_affinity", "debug", "compute_environment", "downcast_bf16",
    "tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "tpu_env", "tpu_vm", "commands", "command_file",
    "mpirun_config", "ipex_config",
}  # fmt: skip
TAKEN = {
    "distributed_type", "num_processes", "num_machines", "mixed_precision", "use_cpu", "fsdp_config",
    "deepspeed_config", "parallelism_config", "dynamo_config", "dynamo_backend", "fp8_config", "megatron_lm_config",
}  # fmt: skip


def read_accelerate(values: Mapping[str, Any], mapped: Mapped) -> None:
    """Map the keys of an Accelerate YAML file; its DeepSpeed block may name a file, which the caller reads."""
    kind = str(values.get("distributed_type") or "NO").upper()
    count = mapped.whole(values, "num_processes") if values.get("num_processes") != -1 else None
    mapped.put(RANKS, count, "num_processes")
    if (mapped.whole(values, "num_machines") or 1) > 1:
        mapped.say("num_machines", "is for the launcher: start every machine with `accelerate launch` or torchrun")
    if kind in DATA_PARALLEL:
        mapped.put(SHARD, "none", "distributed_type")
    elif kind == "FSDP":
        read_fsdp(mapped.part(values, "fsdp_config"), mapped, "fsdp_config.fsdp_")
    elif kind == "DEEPSPEED":
        block = mapped.part(values, "deepspeed_config")
        if not block.get("deepspeed_config_file"):
            from_accelerate(block, mapped)
    else:
        mapped.say("distributed_type", f"{kind} has no counterpart: `cluster.shard` decides what is split")
    _precision(values, mapped)
    if is_on(values.get("use_cpu")):
        mapped.put(DEVICE, "cpu", "use_cpu")
    _compile(values, mapped)
    for name, size in mapped.part(values, "parallelism_config").items():
        if name.endswith("_size") and "dp_" not in name and size not in (None, 1, "1"):
            mapped.say(f"parallelism_config.{name}", "has no counterpart: ranks share data, not layers or sequences")
    mapped.rest(values, TAKEN, ELSEWHERE)


def _precision(values: Mapping[str, Any], mapped: Mapped) -> None:
    word = str(values.get("mixed_precision") or "").lower()
    word = "no" if values.get("mixed_precision") is False else word  # `no` is false to many readers of YAML
    if word == "fp8":
        mapped.say("mixed_precision", "fp8 has no counterpart: write `model.precision: bf16`")
    elif word in PRECISIONS:
        mapped.put(PRECISION, PRECISIONS[word], "mixed_precision")
    elif word:
        raise UserError(
            f"`mixed_precision` is '{word}', which Accelerate does not know", file=mapped.file, fix="write bf16"
        )


def _compile(values: Mapping[str, Any], mapped: Mapped) -> None:
    block = mapped.part(values, "dynamo_config")
    backend = block.get("dynamo_backend", values.get("dynamo_backend"))
    if backend is None or str(backend).upper() in ("NO", "FALSE"):
        return
    if str(backend).upper() == "INDUCTOR":
        mapped.put(COMPILE, True, "dynamo_config.dynamo_backend")
    else:
        mapped.say("dynamo_config.dynamo_backend", f"{backend} has no counterpart: `model.compile` uses inductor")


def read_fsdp(block: Mapping[str, Any], mapped: Mapped, prefix: str = "") -> None:
    """Map an FSDP block, of version 1 or 2, with or without `fsdp_` in front of its keys."""
    values = {key.removeprefix("fsdp_"): value for key, value in block.items()}
    mapped.put(SHARD, _shard(values, mapped, prefix), f"{prefix}sharding_strategy")
    for key in ("offload_params", "cpu_offload"):
        if is_on(values.get(key)):
            mapped.say(prefix + key, OFFLOAD)
    if "activation_checkpointing" in values:
        mapped.put(CHECKPOINTING, is_on(values["activation_checkpointing"]), f"{prefix}activation_checkpointing")
    mapped.rest(values, FSDP_MAPPED, FSDP_TUNING, FSDP_NOT_DONE, prefix)


def _shard(values: Mapping[str, Any], mapped: Mapped, prefix: str) -> str:
    """Version 1 names a strategy, by its word or its number; version 2 says whether weights are split after use."""
    word: Any = values.get("sharding_strategy")
    if word is None:
        reshard = values.get("reshard_after_forward", True)
        is_off = str(reshard).lower() == "false"
        is_word = isinstance(reshard, str) and reshard.lower() not in ("true", "false")
        word = reshard if is_word else "SHARD_GRAD_OP" if is_off else "FULL_SHARD"
    if str(word).isdecimal() and 1 <= int(word) <= len(STRATEGIES):
        word = list(STRATEGIES)[int(word) - 1]
    name = str(word).upper()
    if name not in STRATEGIES:
        raise UserError(f"there is no FSDP strategy '{word}'", file=mapped.file, fix="write FULL_SHARD")
    if name.startswith("HYBRID"):
        mapped.say(f"{prefix}sharding_strategy", f"{name} splits within a machine, Lemma over all ranks")
    return STRATEGIES[name]
