"""What other programs call our options, for those who come from there: TRL, veRL, OpenRLHF, axolotl, Unsloth."""

from __future__ import annotations

# Ours, where it stands as far as that matters, and theirs.
_OF = {
    "alpha": "lora_alpha",
    "checkpointing": "gradient_checkpointing",
    "optim.clip": "grad_clip max_grad_norm max_norm",
    "algorithm.epochs": "num_grpo_epochs num_iterations num_ppo_epochs ppo_epochs",
    "algorithm.clip": "clip_ratio cliprange eps_clip epsilon",
    "clip_high": "epsilon_high clip_ratio_high eps_clip_high",
    "dora": "use_dora peft_use_dora",
    "dir": "output_dir save_path default_local_dir",
    "dropout": "lora_dropout",
    "epochs": "num_epochs num_train_epochs total_epochs max_epochs",
    "checkpoint.every": "save_steps save_freq",
    "validation.every": "eval_steps test_freq val_every_steps",
    "format": "chat_template apply_chat_template",
    "group_size": "num_generations n_samples_per_prompt n",
    "checkpoint.keep": "save_total_limit max_ckpt_num",
    "kind": "type",
    "kl": "beta kl_coef kl_loss_coef init_kl_coef",
    "log_every": "logging_steps",
    "loggers": "report_to logger",
    "lora": "adapter peft_config",
    "loss": "loss_type",
    "lr": "learning_rate",
    "max_length": "max_seq_length sequence_len max_len",
    "rollout.max_tokens": "max_completion_length max_response_length max_new_tokens generate_max_len",
    "optim": "optimizer",
    "packing": "sample_packing packing_samples",
    "path": "model_name model_name_or_path base_model pretrain",
    "precision": "bf16 fp16 dtype torch_dtype param_dtype",
    "prompt_length": "max_prompt_length prompt_max_len",
    "quantize": "load_in_4bit load_in_8bit",
    "r": "lora_r lora_rank rank",
    "modules_to_save": "additional_target lora_modules_to_save",
    "nll": "rpo_alpha",
    "reference_model": "sync_ref_model ref_model",
    "reference_model.every": "ref_model_sync_steps",
    "reference_model.mix": "ref_model_mixup_alpha",
    "reference_model.path": "ref_model_name_or_path ref_model_path",
    "rslora": "use_rslora peft_use_rslora",
    "rewards": "reward_funcs reward_functions reward_fn reward",
    "schedule": "lr_scheduler lr_scheduler_type",
    "validation.share": "val_set_size",
    "source": "data_path dataset dataset_name datasets train_files prompt_data",
    "steps": "max_steps total_training_steps",
    "system": "system_prompt",
    "targets": "target_modules lora_target_modules",
    "truncated": "mask_truncated_completions",
    "validation": "eval_dataset val_files",
    "wandb": "use_wandb",
    "warmup": "warmup_ratio warmup_steps lr_warmup_steps lr_warmup_ratio",
    "weight": "reward_weights",
    "weight_decay": "wd l2",
}
SYNONYMS: dict[str, tuple[str, ...]] = {name: (ours,) for ours, names in _OF.items() for name in names.split()}
SYNONYMS["pairs"] = ("batch.examples",)
SYNONYMS |= dict.fromkeys(
    ("batch_size", "per_device_train_batch_size", "train_batch_size", "rollout_batch_size"),
    ("batch.sequences", "batch.problems", "batch.examples"),
)

_PASSES = "remove it: not needed, since a step takes as many passes as it needs, and `batch.token_budget` bounds memory"
# Theirs for which no option of ours takes the same value, and what to do instead.
REASONS = dict.fromkeys(
    (
        "accumulation",
        "gradient_accumulation_steps",
        "micro_batch_size",
        "micro_train_batch_size",
        "ppo_micro_batch_size_per_gpu",
    ),
    _PASSES,
)
REASONS["use_vllm"] = "write `rollout: {engine: vllm}` in the stage to generate with vLLM"
# Theirs, ours, and how the value changes between them.
CONVERSIONS = {("per_device_train_batch_size", "problems"): "problems = completions / group_size"}

# A stage is of one of three kinds, and most people think of it by its algorithm.
KINDS = dict.fromkeys(
    (
        "grpo",
        "dr_grpo",
        "dapo",
        "gspo",
        "cispo",
        "ppo",
        "rloo",
        "reinforce",
        "reinforce_baseline",
        "loop",
        "luffy",
        "expert_iteration",
    ),
    "rl",
) | dict.fromkeys(("dpo", "kto", "cpo", "simpo", "orpo"), "preference")

# Losses of `algorithm: dpo`, of which many people think as algorithms, by the names that they have elsewhere.
LOSSES = {name: name for name in ("hinge", "ipo", "robust", "exo", "nca", "bco", "sppo", "aot", "discopop")}
LOSSES |= {"exo_pair": "exo", "nca_pair": "nca", "bco_pair": "bco", "sppo_hard": "sppo", "aot_pair": "aot_unpaired"}
LOSSES |= {"apo_zero": "apo_zero", "apo_down": "apo_down"}
# What to write for an algorithm of another name, by the kind of its stage.
ALGORITHMS = {
    "rl": {"grpo_clip": "algorithm: grpo", "no_baseline": "algorithm: reinforce"},
    "preference": {
        "rpo": "algorithm: {name: dpo, nll: 1}",
        "tr_dpo": "algorithm: dpo` and `reference_model: {every: 512}",
        **{name: f"algorithm: {{name: dpo, loss: {loss}}}" for name, loss in LOSSES.items()},
    },
}
