"""One step of GRPO on a GPU, generation included, beside TRL's GRPOTrainer on the same work: time, split, MFU, memory.

    python -m benchmarks.grpo_step                 the whole table, each row in a process of its own
    python -m benchmarks.grpo_step --row '{...}'   one row, as JSON

Work: Qwen2.5 shape, random weights, 32 problems x 8 completions, prompts of 128 and completions of 512 tokens (the end
of sequence is ignored), full fine-tuning with fp32 master weights or LoRA r=16, one update on all 131,072 sampled
tokens, a reward that varies in every group. Lemma's step is that of the reinforcement stage: roller, journal,
advantages, update. MFU of the update = 6 x parameters x tokens / seconds / 790 TFLOP/s (measured on an H200);
recomputation is not counted as work.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.rows import run_rows
from benchmarks.sft_step import MATRIX_RATE, make_config

PROBLEMS, SAMPLES, PROMPT, NEW = 32, 8, 128, 512
VOCABULARY = 151936
STEPS = 4


def make_tokenizer() -> Any:
    """A word for every id, so that any tokens have a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"<unk>": 0, "<eos>": 1, "<pad>": 2}
    words = Tokenizer(models.WordLevel({**special, **{f"w{i}": i for i in range(3, VOCABULARY)}}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")


def questions(count: int) -> list[str]:
    rng = random.Random(0)
    return [" ".join(f"w{rng.randint(5, VOCABULARY - 1)}" for _ in range(PROMPT)) for _ in range(count)]


def make_policy(row: dict[str, Any], tokenizer: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    from lemma.models import blocks
    from lemma.models.attention import NAME
    from lemma.models.load_model import _with_lora
    from lemma.models.model_options import LoraOptions
    from lemma.models.policy import Policy

    torch.manual_seed(0)
    with torch.device("cuda"):
        causal = AutoModelForCausalLM.from_config(
            make_config(row["shape"]), dtype=torch.bfloat16, attn_implementation=NAME
        )
    for parameter in causal.parameters():
        parameter.requires_grad_(not row.get("lora"))
    blocks.install(causal, True)
    if row.get("recompute"):
        causal.gradient_checkpointing_enable({"use_reentrant": False})
    module = _with_lora(causal, LoraOptions(r=16), "benchmark", 0) if row.get("lora") else causal
    return Policy(module, tokenizer)


def make_roller(row: dict[str, Any], policy: Any, algorithm: Any, folder: Path) -> Any:
    from lemma.core.types import Message, Problem
    from lemma.engines.native.engine import BLOCK, NativeEngine
    from lemma.engines.protocol import Sampling
    from lemma.formats import make_format
    from lemma.formats.encode import encode_text
    from lemma.rewards.reward import Reward, RewardInput
    from lemma.rollouts import Judge, ProblemOrder, Roller, Task

    class Varies(Reward):
        """A number that depends on the sampled ids."""

        name: str = "varies"

        def score(self, item: RewardInput) -> float:
            return float(sum(item.ids) % 7)

    rows = PROBLEMS * SAMPLES
    engine = NativeEngine(policy, 0, cache_tokens=rows * (PROMPT + NEW + BLOCK), max_sequences=rows)
    tasks = [
        Task(Problem((Message("user", text),), ("1",)), np.asarray(encode_text(text, policy.tokenizer)))
        for text in questions(512)
    ]
    return Roller(
        engine,
        Judge(make_format("question_only"), [Varies()], policy.tokenizer, grade=False),
        Sampling(max_tokens=NEW, ignore_eos=True),
        algorithm,
        ProblemOrder(tasks, 0, "benchmark"),
        folder,
        problems=PROBLEMS,
        further_rounds=0,
        seed=0,
        name="benchmark",
    )


def run_lemma(row: dict[str, Any]) -> dict[str, Any]:
    import torch

    from lemma.algorithms import ALGORITHMS, Memory
    from lemma.learning.learner import Learner
    from lemma.learning.learning_options import OptimOptions
    from lemma.stages.reinforcement.rl_loop import has_advantage, update

    algorithm, memory = ALGORITHMS["grpo"](group_size=SAMPLES), Memory()
    policy = make_policy(row, make_tokenizer())
    learner = Learner(
        policy,
        OptimOptions(lr=1e-6),
        token_budget=row["budget"],
        total_steps=100,
        say=lambda text: print(text, file=sys.stderr),
    )
    roller = make_roller(row, policy, algorithm, Path(tempfile.mkdtemp()))
    stage: Any = SimpleNamespace(seed=0, name="benchmark")
    split: list[tuple[float, float]] = []
    for step in range(1, STEPS + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        rollouts = roller.step(step)
        torch.cuda.synchronize()
        middle = time.perf_counter()
        if row.get("release"):
            roller.engine.release_cache()
        algorithm.assign(rollouts.groups, memory)
        worth = [group for group in rollouts.groups if has_advantage(group)]
        (report,) = update(stage, step, algorithm, memory, learner, None, rollouts.groups, worth, NEW)
        roller.engine.update_weights(step)
        torch.cuda.synchronize()
        split.append((middle - begin, time.perf_counter() - middle))
    assert report.trained_tokens == PROBLEMS * SAMPLES * NEW, report.trained_tokens
    assert report.tokens == PROBLEMS * SAMPLES * (PROMPT + NEW), report.tokens
    parameters = sum(p.numel() for p in policy.causal.parameters())
    generate, learn = (float(np.median([part[i] for part in split[1:]])) for i in (0, 1))
    return row | {
        "seconds": float(np.median([sum(part) for part in split[1:]])),
        "generate_seconds": generate,
        "update_seconds": learn,
        "first_step": sum(split[0]),
        "tokens_per_second": PROBLEMS * SAMPLES * NEW / generate,
        "mfu": 6.0 * parameters * report.tokens / learn / MATRIX_RATE,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        "trained_tokens": report.trained_tokens,
        "packs": report.packs,
        "mismatch_mean": report.metrics["mismatch/mean"],
        "budget_after": learner.token_budget,
    }


def run_trl(row: dict[str, Any]) -> dict[str, Any]:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    config = make_config(row["shape"])
    config.eos_token_id, config.pad_token_id = 1, 2
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.generation_config.eos_token_id = None
    peft = None
    if row.get("lora"):
        from peft import LoraConfig

        peft = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=row["batch"],
        gradient_accumulation_steps=PROBLEMS * SAMPLES // row["batch"],
        num_generations=SAMPLES,
        max_completion_length=NEW,
        learning_rate=1e-6,
        bf16=True,
        gradient_checkpointing=False,
        use_liger_kernel=row["liger"],
        max_steps=row.get("steps", 2),
        logging_steps=100,
        save_strategy="no",
        report_to=[],
        beta=0.0,
        temperature=1.0,
    )
    times: list[float] = []

    class Timer(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            torch.cuda.synchronize()
            self.begin = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            torch.cuda.synchronize()
            times.append(time.perf_counter() - self.begin)

    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        return [float(len(text) % 7) for text in completions]

    trainer = GRPOTrainer(
        model=model,
        args=arguments,
        reward_funcs=reward,
        train_dataset=Dataset.from_list([{"prompt": text} for text in questions(512)]),
        processing_class=tokenizer,
        peft_config=peft,
        callbacks=[Timer()],
    )
    trainer.train()
    return row | {
        "seconds": float(np.median(times[1:] or times)),
        "first_step": times[0],
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def default_rows() -> list[dict[str, Any]]:
    return [
        {"who": "lemma", "shape": "1.5B", "budget": 16640, "recompute": True},
        {"who": "lemma", "shape": "1.5B", "budget": 24320, "recompute": True},
        {"who": "lemma", "shape": "1.5B", "budget": 16640, "lora": True},
        *({"who": "trl", "shape": "1.5B", "batch": batch, "liger": True} for batch in (16, 8, 32)),
        {"who": "trl", "shape": "1.5B", "batch": 16, "liger": True, "lora": True},
    ]


if __name__ == "__main__":
    run_rows("benchmarks.grpo_step", __doc__, {"lemma": run_lemma, "trl": run_trl}, default_rows)
