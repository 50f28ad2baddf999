"""`cluster.config`: files as DeepSpeed, Accelerate and transformers document them, in Lemma's words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lemma.cli import main
from lemma.core.errors import UserError
from lemma.planning.run_plan import foreign_sentences
from lemma.plugins.foreign_configs.foreign_configs import ForeignConfig, read_foreign
from lemma.recipe import Recipe, load_recipe

SCALING = {"loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1}
ALL_AUTO = {
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
# The configuration that transformers' page on DeepSpeed builds up for ZeRO-3 with offloading.
ZERO_3 = {
    "fp16": {"enabled": "auto", **SCALING},
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    **ALL_AUTO,
}
# DeepSpeed's own tutorial on ZeRO, stage 2 with numbers everywhere.
ZERO_2 = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.5,
    "bf16": {"enabled": True},
    "optimizer": {"type": "Adam", "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 1000, "total_num_steps": 10000},
    },
    "zero_optimization": {
        "stage": 2,
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 2e8,
        "contiguous_gradients": True,
        "offload_optimizer": {"device": "none"},
    },
}
COMMON = """
compute_environment: LOCAL_MACHINE
debug: false
downcast_bf16: 'no'
machine_rank: 0
main_training_function: main
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
# As `accelerate config` writes them, and as TRL ships them.
MULTI_GPU = (
    COMMON + "distributed_type: MULTI_GPU\ngpu_ids: all\nmixed_precision: 'no'\nnum_machines: 1\nnum_processes: 8\n"
)
FSDP_1 = (
    COMMON
    + """
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: false
  fsdp_offload_params: true
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_use_orig_params: true
mixed_precision: bf16
num_machines: 1
num_processes: 8
"""
)
FSDP_2 = (
    COMMON
    + """
distributed_type: FSDP
enable_cpu_affinity: false
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_version: 2
mixed_precision: bf16
num_machines: 2
num_processes: 16
"""
)
DEEPSPEED = (
    COMMON
    + """
deepspeed_config:
  deepspeed_multinode_launcher: standard
  gradient_accumulation_steps: 2
  gradient_clipping: 1.0
  offload_optimizer_device: none
  offload_param_device: nvme
  zero3_init_flag: true
  zero3_save_16bit_model: true
  zero_stage: 3
distributed_type: DEEPSPEED
mixed_precision: fp16
num_machines: 1
num_processes: 4
"""
)
# transformers' Trainer: `--fsdp_config fsdp.json`, of today and of version 4.
TRAINER = {"version": 2, "reshard_after_forward": False, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
           "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "cpu_offload": False}  # fmt: skip
TRAINER_XLA = {"xla": True, "xla_fsdp_v2": True, "xla_fsdp_grad_ckpt": True, "min_num_params": 0}


def foreign(folder: Path, content: Any) -> ForeignConfig:
    file = folder / ("config.yaml" if isinstance(content, str) else "config.json")
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return read_foreign(str(file))


def words(config: ForeignConfig) -> dict[str, Any]:
    return {".".join(place): value for place, value in config.values.items()}


@pytest.mark.parametrize(
    ("content", "system", "expected"),
    [
        (ZERO_3, "DeepSpeed", {"cluster.shard": "weights", "optim.schedule": "constant"}),
        (
            ZERO_2,
            "DeepSpeed",
            {
                "cluster.ranks": 8, "cluster.shard": "gradients", "batch.step": 64, "model.precision": "bf16",
                "optim.clip": 0.5, "optim.lr": 3e-5, "optim.betas": [0.8, 0.999], "optim.eps": 1e-8,
                "optim.weight_decay": 3e-7, "optim.schedule": "linear", "optim.warmup": 1000,
            },
        ),
        ({"zero_optimization": {"stage": 1}, "bf16": {"enabled": "auto"}}, "DeepSpeed", {"cluster.shard": "optimiser"}),
        ({"train_batch_size": 8, "fp16": {"enabled": True, **SCALING}}, "DeepSpeed",
         {"batch.step": 8, "model.precision": "fp16"}),
        (MULTI_GPU, "Accelerate", {"cluster.ranks": 8, "cluster.shard": "none", "model.precision": "fp32"}),
        (FSDP_1, "Accelerate", {"cluster.ranks": 8, "cluster.shard": "weights", "model.precision": "bf16"}),
        (FSDP_1.replace("FULL_SHARD", "2"), "Accelerate",
         {"cluster.ranks": 8, "cluster.shard": "gradients", "model.precision": "bf16"}),
        (FSDP_2, "Accelerate",
         {"cluster.ranks": 16, "cluster.shard": "weights", "model.precision": "bf16", "model.checkpointing": True}),
        (DEEPSPEED, "Accelerate",
         {"cluster.ranks": 4, "cluster.shard": "weights", "model.precision": "fp16", "optim.clip": 1}),
        (TRAINER, "FSDP", {"cluster.shard": "gradients"}),
        ({"fsdp": "full_shard auto_wrap", "fsdp_config": {"min_num_params": 2000}}, "FSDP",
         {"cluster.shard": "weights"}),
        (TRAINER_XLA, "FSDP", {"cluster.shard": "weights"}),
        ({"fsdp": "shard_grad_op offload"}, "FSDP", {"cluster.shard": "gradients"}),
        ({"bf16": {"enabled": "true"}, "fp16": {"enabled": 0}}, "DeepSpeed", {"model.precision": "bf16"}),
        (COMMON + "distributed_type: fsdp\nmixed_precision:\n", "Accelerate", {"cluster.shard": "weights"}),
        (COMMON + "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: }\n", "Accelerate",
         {"cluster.shard": "gradients"}),
    ],
)  # fmt: skip
def test_words(content: Any, system: str, expected: dict[str, Any], tmp_path: Path) -> None:
    config = foreign(tmp_path, content)
    assert config.system == system and words(config) == expected


def test_what_has_no_counterpart_is_named_once(tmp_path: Path) -> None:
    notes = foreign(tmp_path, ZERO_3).notes
    for key in ("zero_optimization.offload_optimizer", "zero_optimization.offload_param"):
        assert sum(f"`{key}` has no counterpart" in note for note in notes) == 1
    autos = next(note for note in notes if note.startswith("auto is what the recipe says"))
    assert all(f"`{key}`" in autos for key in ("train_batch_size", "gradient_clipping", "bf16.enabled", "fp16.enabled"))
    assert "`optimizer.params.lr`" in autos and "stage3_prefetch" not in autos
    assert any("Lemma decides" in note and "`zero_optimization.reduce_bucket_size`" in note for note in notes)
    assert not any("not known" in note for note in notes) and len(notes) == 5, notes


@pytest.mark.parametrize(
    ("content", "key"),
    [
        (FSDP_1, "fsdp_config.fsdp_offload_params"),
        (FSDP_1.replace("FULL_SHARD", "HYBRID_SHARD"), "fsdp_config.fsdp_sharding_strategy"),
        (FSDP_2, "num_machines"),
        (DEEPSPEED, "deepspeed_config.offload_param_device"),
        (DEEPSPEED, "gradient_accumulation_steps"),
        (ZERO_2, "train_micro_batch_size_per_gpu"),
        (ZERO_2, "scheduler.params.total_num_steps"),
        (TRAINER_XLA, "xla"),
        (MULTI_GPU + "parallelism_config: {parallelism_config_tp_size: 2}\n",
         "parallelism_config.parallelism_config_tp_size"),
        (MULTI_GPU.replace("MULTI_GPU", "MEGATRON_LM"), "distributed_type"),
        ({"bf16": {"enabled": True}, "optimizer": {"type": "Lamb", "params": {"lr": 1}}}, "optimizer.type"),
        ({"bf16": {"enabled": True}, "zero_optimisation": {}}, "zero_optimisation"),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}},
         "zero_optimization.zero_hpz_partition_size"),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, "fp16.loss_scale"),
    ],
)  # fmt: skip
def test_a_sentence_for_each(content: Any, key: str, tmp_path: Path) -> None:
    assert sum(note.startswith(f"`{key}` ") for note in foreign(tmp_path, content).notes) == 1


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"zero_optimization": {"stage": 4}}, "no ZeRO stage 4"),
        (
            {"train_batch_size": 10, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4},
            "no multiple",
        ),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "both enabled"),
        ({"bf16": {"enabled": True}, "gradient_clipping": "some"}, "not a number"),
        ({"bf16": True}, "not a block"),
        ({"learning_rate": 1e-5}, "no configuration of DeepSpeed, Accelerate or FSDP"),
        ({"sharding_strategy": "SOME_SHARD"}, "no FSDP strategy 'SOME_SHARD'"),
        (MULTI_GPU.replace("'no'", "half"), "Accelerate does not know"),
        ([1], "no block of keys"),
        ({"bf16": {"enabled": "perhaps"}}, "`bf16.enabled` is 'perhaps'; write true, false or auto"),
        ({"bf16": {"enabled": True}, "gradient_clipping": 10**400}, r"is 1000.{0,60}, not a number"),
        ({"sharding_strategy": "\u00b2"}, "no FSDP strategy"),
        # What the options do not take is said in the words of the file.
        ({"bf16": {}, "optimizer": {"type": "AdamW", "params": {"lr": -1}}},
         "`optimizer.params.lr`: 'lr' cannot be -1; write a number of at least 0"),
        ({"bf16": {}, "optimizer": {"type": "AdamW", "params": {"betas": [0.9, "b"]}}}, "`optimizer.params.betas`: "),
        ({"bf16": {}, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2.5}}},
         "`scheduler.params.warmup_num_steps`: warmup is a share below 1"),
        (MULTI_GPU.replace("num_processes: 8", "num_processes: 70000"), "`num_processes`: 'ranks' cannot be 70000"),
    ],
)  # fmt: skip
def test_mistakes_are_one_sentence(content: Any, problem: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=problem):
        foreign(tmp_path, content)


RECIPE = """
model: {{precision: fp32}}
cluster: {{config: {file}}}
stages:
  sft: {{steps: 3, optim: {{lr: 0.001}}}}
  dpo: {{steps: 3, data: {{source: pairs.jsonl}}, batch: {{examples: 16}}}}
  grpo: {{steps: 3}}
"""


def test_a_recipe_stands_and_the_file_fills_what_it_leaves_open(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(ZERO_2))
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(file=tmp_path / "ds.json"))
    recipe = load_recipe(tmp_path / "recipe.yaml")
    sft, dpo, grpo = recipe.stages.values()
    assert (recipe.cluster.ranks, recipe.cluster.shard, recipe.model.precision) == (8, "gradients", "fp32")
    assert sft.batch.sequences == 64 and dpo.batch.examples == 16  # type: ignore[attr-defined]
    assert [stage.optim.lr for stage in (sft, dpo, grpo)] == [0.001, 3e-5, 3e-5]
    assert {stage.optim.clip for stage in (sft, dpo, grpo)} == {0.5} and sft.optim.betas == (0.8, 0.999)
    (tmp_path / "resolved.yaml").write_text(recipe.to_yaml())
    assert load_recipe(tmp_path / "resolved.yaml") == recipe
    other = load_recipe(tmp_path / "recipe.yaml", ["cluster.config=null", "stages.sft.optim.clip=0.5"])
    assert other.cluster.ranks is None and other.stages["grpo"].optim.clip == 1.0
    assert main(["plan", str(tmp_path / "recipe.yaml")]) == 1, "neither the model nor the data are there"
    out = capsys.readouterr().out
    assert "the recipe says model.precision: fp32, which stands against bf16" in out
    assert "the recipe says stages.sft.optim.lr: 0.001, which stands against 3e-05" in out
    assert "the recipe says stages.dpo.batch.examples: 16, which stands against 64" in out
    assert "optim.clip" not in out and "`train_micro_batch_size_per_gpu` has no effect by itself" in out


def test_an_accelerate_file_may_name_one_of_deepspeeds(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({**ZERO_3, "gradient_clipping": 0.3}))
    content = COMMON + "distributed_type: DEEPSPEED\nnum_processes: 4\nnum_machines: 1\n"
    content += "deepspeed_config: {deepspeed_config_file: ds.json, zero3_init_flag: true}\n"
    assert words(foreign(tmp_path, content)) == {
        "cluster.ranks": 4, "cluster.shard": "weights", "optim.clip": 0.3, "optim.schedule": "constant",
    }  # fmt: skip


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("cluster: {config: nowhere.json}\nstages: {sft: {steps: 1}}\n")
    with pytest.raises(UserError, match=r"there is no file nowhere\.json"):
        load_recipe(tmp_path / "recipe.yaml")


def test_what_deepspeeds_own_reader_takes(tmp_path: Path) -> None:
    """Comments and last commas; a key that is there twice is refused, as there."""
    file = tmp_path / "ds.json"
    file.write_text(
        '// of last week\n{\n  "bf16": {"enabled": true, /* not\n  fp16 */}, # yet\n  "train_batch_size": 8,\n'
        '  "wandb": {"project": "a // b, }", "enabled": true,},\n}\n'
    )
    found = read_foreign(str(file))
    assert words(found) == {"batch.step": 8, "model.precision": "bf16"}
    assert found.notes == ("`wandb` has no effect: loggers are named under `run`",)
    file.write_text('{"bf16": {"enabled": true}, "bf16": {"enabled": false}}')
    with pytest.raises(UserError, match="the key 'bf16' is there twice; remove one of them"):
        read_foreign(str(file))
    file.write_text('{\n// one\n"bf16": yes}')
    with pytest.raises(UserError, match=r"ds\.json:3: this is no JSON"):
        read_foreign(str(file))


def test_nobodys_home(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no file ~nobody-at-all/ds\.json"):
        read_foreign("~nobody-at-all/ds.json")


def test_settings_that_accelerate_launch_keeps_to_itself_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recipe = Recipe.model_validate({"stages": {"sft": {"kind": "supervised"}}})
    assert foreign_sentences(recipe) == []
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    [said] = foreign_sentences(recipe)
    assert "given settings of FSDP" in said and "name its file as `cluster.config`" in said
