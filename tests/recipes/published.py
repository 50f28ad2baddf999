"""The settings that the public systems published, by recipe and by key; from their descriptions, not from recipes."""

from __future__ import annotations

from typing import Any

# Recipes of our own, which follow no other system.
OWN = {"arithmetic_63m", "demo", "higher_lower", "smollm2_gsm8k"}

# Agents in AppWorld: settings of their last stage. tests/environments trains their twins, where AppWorld is.
AGENTS: dict[str, dict[str, Any]] = {
    "appworld_loop": {
        "algorithm.name": "loop", "algorithm.group_size": 6, "algorithm.epochs": 2, "algorithm.clip": 0.1,
        "algorithm.ratio": "token", "algorithm.least_advantage": 0.01, "algorithm.kl": 0.0, "batch.problems": 40,
        "environment.agent": "conversation", "environment.turns": 40, "environment.reply_tokens": 3000,
        "environment.episode_tokens": 32000, "environment.difficulty": [1, 2], "environment.reward": "tests",
        "environment.pay_for_nothing": True, "rollout.temperature": 1.0, "rollout.max_tokens": 1500, "steps": 200,
        "optim.lr": 5e-5, "optim.weight_decay": 0.01, "optim.schedule": "constant", "optim.clip": 0.1,
    },
    "appworld_ppo": {
        "algorithm.name": "ppo", "algorithm.clip": 0.2, "algorithm.lam": 0.95, "environment.agent": "rebuilt",
        "environment.turns": 30, "environment.reward": "compat", "rollout.temperature": 0.7, "rollout.top_p": 0.9,
        "rollout.max_tokens": 24576,
    },
    "appworld_grpo": {
        "algorithm.name": "grpo", "algorithm.group_size": 2, "environment.agent": "rebuilt",
        "environment.reward": "tests", "environment.pay_for_nothing": True, "optim.lr": 5e-7,
    },
}  # fmt: skip

SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

# Defaults of TRL 0.18 that its users left alone: beta, epsilon, loss_type bnpo, scale_rewards, 1e-4 beside the
# deviation.
TRL = {
    "algorithm.name": "grpo",
    "algorithm.epochs": 1,
    "algorithm.mini_batches": 1,
    "algorithm.clip": 0.2,
    "algorithm.clip_high": None,
    "algorithm.kl": 0.04,
    "algorithm.kl_estimator": "k3",
    "algorithm.scale": "group",
    "algorithm.epsilon": 1e-4,
    "algorithm.normalise": "token",
    "rollout.temperature": 1.0,
    "rollout.top_p": 1.0,
    "truncated": "keep",
}

GSM8K = TRL | {
    "algorithm.group_size": 16,
    "rollout.max_tokens": 786,
    "data.source": "gsm8k",
    "data.prompt_length.max_tokens": 256,
    "batch.problems": 1,
    "epochs": 1,
    "optim.name": "adamw",
    "optim.lr": 5e-6,
    "optim.betas": (0.9, 0.99),
    "optim.weight_decay": 0.1,
    "optim.warmup": 0.1,
    "optim.schedule": "cosine",
    "optim.clip": 0.1,
    "checkpoint.every": 100,
}

COURSE = {
    "algorithm.group_size": 8,
    "batch.problems": 32,
    "data.source": "math",
    "rollout.temperature": 1.0,
    "rollout.min_tokens": 4,
    "rollout.max_tokens": 1024,
    "optim.lr": 1e-5,
    "optim.betas": (0.9, 0.95),
    "optim.weight_decay": 0.0,
    "optim.schedule": "constant",
    "optim.clip": 1.0,
}
COURSE_GRPO = COURSE | {
    "algorithm.name": "grpo",
    "algorithm.epochs": 3,
    "algorithm.mini_batches": 2,
    "algorithm.clip": 0.2,
    "algorithm.scale": "group",
    "algorithm.epsilon": 1e-6,
    "algorithm.normalise": "constant",
    "algorithm.constant": None,
    "algorithm.kl": 0.0,
    "steps": 50,
}

LUFFY = {
    "algorithm.name": "luffy",
    "algorithm.group_size": 8,
    "algorithm.epochs": 1,
    "algorithm.mini_batches": 2,
    "algorithm.prefix.samples": 1,
    "algorithm.prefix.min": 1.0,
    "algorithm.prefix.max": 1.0,
    "algorithm.prefix.strategy": "random",
    "algorithm.off_policy.reshape": "p_div_p",
    "algorithm.off_policy.gamma": 0.1,
    "algorithm.off_policy.behaviour": "one",
    "algorithm.compat.on_policy.reshape": "no_reshape",
    "algorithm.statistics": "group",
    "algorithm.scale": "none",
    "algorithm.clip": None,
    "algorithm.normalise": "constant",
    "algorithm.constant": None,
    "algorithm.sft_weight": None,
    # 0.001 for each micro-batch, eight of 32,768 tokens in a GPU's update, beside a sum over its 64 samples.
    "algorithm.entropy": 0.001 * 8 / 64,
    "algorithm.kl": 0.0,
    "rollout.temperature": 1.0,
    "rollout.top_p": 1.0,
    "rollout.max_tokens": 8192,
    "data.source": "data/openr1.parquet",
    "data.prompt_length.max_tokens": 1024,
    "batch.problems": 128,
    "batch.token_budget": 32768,
    "steps": 500,
    "optim.lr": 1e-6,
    "optim.schedule": "constant",
    "optim.clip": 1.0,
    "checkpoint.every": 50,
    "eval.every": 10,
    "eval.at_start": False,
    "eval.temperature": 0.6,
}
ON_POLICY = LUFFY | {"algorithm.prefix.samples": 0, "algorithm.clip": 0.2}
LUFFY_SFT = {
    "max_length": 16384,
    "epochs": 3,
    "batch.sequences": 64,
    "optim.lr": 5e-5,
    "optim.warmup": 0.1,
    "data.source": "data/openrlhf_sft/train.jsonl",
}

# Settings of each stage, and the rewards with what a completion that deserves all of them gets: name -> most points.
STAGES: dict[str, dict[str, dict[str, Any]]] = {
    "gsm8k_xml_grpo_qwen": {"grpo": GSM8K},
    "gsm8k_xml_grpo_llama": {"grpo": GSM8K},
    "math_r1_zero_grpo": {"grpo": COURSE_GRPO},
    "math_r1_zero_grpo_no_clip": {"grpo": COURSE_GRPO | {"algorithm.clip": None}},
    "math_r1_zero_reinforce_baseline": {
        "rl": COURSE
        | {
            "algorithm.name": "reinforce_baseline",
            "algorithm.scale": "group",
            "algorithm.epsilon": 1e-6,
            "algorithm.normalise": "sequence",
            "steps": 200,
        }
    },
    "math_r1_zero_reinforce": {
        "rl": COURSE | {"algorithm.name": "reinforce", "algorithm.normalise": "sequence", "steps": 200}
    },
    "math_expert_iteration": {
        "expert_iteration": {
            "algorithm.name": "expert_iteration",
            "algorithm.threshold": 1.0,
            "batch.problems": 512,
            "rollout.min_tokens": 4,
            "rollout.max_tokens": 1024,
            "steps": 5,
            "optim.clip": 1.0,
        }
    },
    "openmath_sft_dapo_grpo": {
        "sft": {
            "data.source": "open_math_reasoning_mini",
            "data.split": "cot",
            "data.answers": "number",
            "max_length": 1024,
            "epochs": 2,
            "batch.sequences": 1,
            "optim.name": "adamw_8bit",
            "optim.lr": 2e-4,
            "optim.warmup": 5,
            "optim.schedule": "linear",
            "optim.betas": (0.9, 0.999),
            "optim.weight_decay": 0.001,
        },
        "grpo": TRL
        | {
            "algorithm.group_size": 2,
            "data.source": "dapo_math",
            "data.prompt_length.percentile": 0.9,
            "rollout.max_tokens": None,
            "rollout.min_p": 0.1,
            "rollout.top_k": 0,
            "batch.problems": 2,
            "validation.share": 0.1,
            "validation.every": 20,
            "steps": 100,
            "optim.name": "adamw_8bit",
            "optim.lr": 5e-6,
            "optim.warmup": 0.1,
            "optim.schedule": "linear",
            "optim.weight_decay": 0.001,
        },
    },
    "numina_grpo": {
        "grpo": TRL
        | {
            "algorithm.group_size": 4,
            "data.source": "numina_tir",
            "data.split": "train[:5%]",
            "rollout.max_tokens": 64,
            "batch.problems": 32,
            "epochs": 1,
            "optim.lr": 1e-5,
            "optim.schedule": "linear",
            "checkpoint.every": 10,
            "log_every": 10,
        }
    },
    "rlvr_gsm8k_grpo": {
        "grpo": TRL
        | {
            "algorithm.group_size": 4,
            "algorithm.epochs": 2,
            "data.source": "ai2-adapt-dev/gsm8k-train-round2",
            "data.reader": "rlvr",
            "rollout.max_tokens": 256,
            "batch.problems": 1,
            "epochs": 1,
            "optim.lr": 5e-7,
            "optim.schedule": "linear",
            "log_every": 1,
        }
    },
    "numina_ppo": {
        "ppo": {
            "algorithm.name": "ppo",
            "algorithm.group_size": 1,
            "algorithm.epochs": 4,
            "algorithm.mini_batches": 1,
            "algorithm.clip": 0.2,
            "algorithm.value_clip": 0.2,
            "algorithm.value_weight": 0.1,
            "algorithm.gamma": 1.0,
            "algorithm.lam": 0.95,
            "algorithm.whiten": True,
            "algorithm.compat.whiten_rewards": False,
            "algorithm.kl": 0.05,
            "algorithm.kl_in": "reward",
            "algorithm.kl_estimator": "k1",
            "algorithm.compat.missing_eos_score": -1.0,
            "algorithm.normalise": "token",
            "data.prompt_length.max_tokens": 256,
            "rollout.temperature": 1.0,
            "rollout.max_tokens": 53,
            "rollout.min_tokens": 0,
            "batch.problems": 64,
            "steps": 100_000 // 64,
            "optim.lr": 2e-5,
            "optim.schedule": "linear",
            "checkpoint.every": 200,
        }
    },
    "luffy": {"luffy": LUFFY},
    "luffy_on_policy": {"rl": ON_POLICY},
    "luffy_rl_sft_loss": {"rl": LUFFY | {"algorithm.statistics": "on_policy", "algorithm.sft_weight": 1.0}},
    "luffy_sft_rl": {"sft": LUFFY_SFT, "rl": ON_POLICY | {"data.source": "data/openr1.complement.parquet"}},
}

FIVE = {"tag_count": 0.5, "soft_format": 0.5, "strict_format": 0.5, "integer": 0.5, "correctness": 2.0}
FOUR = {"exact_format": 3.0, "approximate_format": 1.5, "answer": 5.0, "numbers": 3.0}
REWARDS: dict[str, dict[str, float]] = {
    **{name: FIVE for name in STAGES if name.startswith("gsm8k")},
    **{name: {"r1_zero": 1.0} for name in STAGES if name.startswith("math")},
    **{name: {"accuracy": 1.0} for name in STAGES if name.startswith("luffy")},
    "openmath_sft_dapo_grpo": FOUR,
    "numina_grpo": {"accuracy": 1.0, "think_answer_format": 1.0},
    "rlvr_gsm8k_grpo": {"accuracy": 1.0, "think_answer_format": 1.0},
    "numina_ppo": {"accuracy": 10.0},
}

QWEN_7B = {
    "model.path": "Qwen/Qwen2.5-Math-7B",
    "model.override": {"rope_theta": 40000, "max_position_embeddings": 16384},
    "model.lora": None,
    "format.name": "think_boxed",
}
MATH_MODEL = {"model.path": "Qwen/Qwen2.5-Math-1.5B", "model.lora": None, "format.name": "r1_zero"}
LORA = {"model.lora.r": 16, "model.lora.alpha": 64.0, "model.lora.dropout": 0.0, "model.lora.targets": SEVEN}
MODELS: dict[str, dict[str, Any]] = {
    "gsm8k_xml_grpo_qwen": {
        "model.path": "Qwen/Qwen2.5-1.5B-Instruct",
        **LORA,
        "format.name": "xml",
    },
    "gsm8k_xml_grpo_llama": {
        "model.path": "meta-llama/Llama-3.2-1B-Instruct",
        **LORA,
        "format.name": "xml",
    },
    **{name: MATH_MODEL for name in STAGES if name.startswith("math")},
    **{name: QWEN_7B for name in STAGES if name.startswith("luffy")},
    "openmath_sft_dapo_grpo": {
        "model.path": "Qwen/Qwen3-4B-Base",
        "model.override": {"max_position_embeddings": 2048},
        **LORA,
        "model.lora.r": 32,
        "format.name": "working_out",
        "run.seed": 3407,
    },
    "numina_grpo": {"model.path": "Qwen/Qwen3-0.6B", "model.lora": None, "format.name": "think_answer"},
    "rlvr_gsm8k_grpo": {
        "model.path": "Qwen/Qwen3-0.6B",
        "model.lora": None,
        "model.checkpointing": True,
        "format.name": "think_answer",
        "run.seed": 42,
    },
    "numina_ppo": {"model.path": "Qwen/Qwen3-0.6B", "model.lora": None, "format.name": "boxed"},
}

# Recipes without reinforcement, by stage. Preference: defaults of TRL 0.18 for beta, learning rate and length.
PAIRS = {"optim.lr": 1e-6, "max_length": 1024, "algorithm.beta": 0.1}
OTHERS: dict[str, dict[str, dict[str, Any]]] = {
    "openmath_sft": {
        "sft": STAGES["openmath_sft_dapo_grpo"]["sft"] | {"data.source": "unsloth/OpenMathReasoning-mini"}
    },
    "math_sft": {
        "sft": {
            "unique_examples": "all",
            "shuffle": False,
            "epochs": 10,
            "batch.sequences": 128,
            "optim.lr": 5e-5,
            "optim.betas": (0.9, 0.999),
            "optim.eps": 1e-8,
            "optim.clip": 1.0,
            "optim.schedule": "cosine",
            "optim.warmup": 0,
            "optim.weight_decay": 0.0,
            "eval.every": 20,
            "eval.temperature": 0.0,
            "eval.max_tokens": 1024,
        }
    },
    "luffy_sft": {"sft": LUFFY_SFT},
    "dpo": {"dpo": PAIRS | {"algorithm.loss": "sigmoid"}},
    "kto": {"kto": PAIRS | {"algorithm.wanted_weight": 1.0, "algorithm.unwanted_weight": 1.0}},
    "cpo": {"cpo": PAIRS | {"algorithm.nll": 1.0}},
    "orpo": {"orpo": PAIRS},
}

# Systems that log to Weights & Biases.
WANDB = ("math_", "gsm8k_xml_")
