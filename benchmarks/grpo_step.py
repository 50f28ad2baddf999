"""Steps of the GRPO stage, generation included, beside TRL's GRPOTrainer on the same work: time, split, MFU, memory.

    python -m benchmarks.grpo_step                 all rows, each in a process of its own, and a table at the end
    python -m benchmarks.grpo_step --row '{...}'   one row, as JSON
    python -m benchmarks.grpo_step --shape tiny --prompt 16 --new 32 --device cpu --rows '[{"who": "lemma"}]'

Work: Qwen2.5 shape, random weights, 32 problems x 8 completions, prompts of 128 and completions of 512 tokens (at
random weights hardly one ends before), full fine-tuning with fp32 master weights or LoRA r=16, one update on all
sampled tokens, a reward that varies in every group. Lemma runs the reinforcement stage itself, from a recipe:
rewards, journal, advantages, update, metrics and diagnosis. `metrics` is the time to compute and write the numbers of
a step, `diagnosis` the time to look at them; both are part of `seconds`, and `rest` is what no other column names.
MFU of the update = 6 x parameters x tokens / seconds / 790 TFLOP/s (measured on an H200); recomputation is not
counted as work, and a prompt that is computed once for all of its completions counts as often as it is learnt from.
"""

from __future__ import annotations

import contextlib
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.rows import run_rows
from benchmarks.sft_step import MATRIX_RATE, make_config

OPTIONS = {"shape": "1.5B", "problems": 32, "samples": 8, "prompt": 128, "new": 512, "steps": 4, "device": "cuda"}
QUESTIONS = 512
PARTS = ("generate", "grade", "score", "update", "metrics", "diagnosis")
REWARD = '''
def varies(item):
    """A number that depends on the sampled ids."""
    return float(sum(item.ids) % 101)
'''


class Enough(Exception):
    """All steps are measured: what a run saves at its end is not part of a step."""


def make_tokenizer(vocabulary: int) -> Any:
    """A word for every id, so that any tokens have a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"<unk>": 0, "<eos>": 1, "<pad>": 2}
    words = Tokenizer(models.WordLevel({**special, **{f"w{i}": i for i in range(3, vocabulary)}}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")


def questions(row: dict[str, Any], vocabulary: int) -> list[str]:
    rng = random.Random(0)
    return [" ".join(f"w{rng.randint(5, vocabulary - 1)}" for _ in range(row["prompt"])) for _ in range(QUESTIONS)]


def write_model(row: dict[str, Any], folder: Path) -> int:
    """A model with random weights in the Hugging Face format; how many parameters it has."""
    import torch
    from transformers import AutoModelForCausalLM

    config = make_config(row["shape"])
    config.eos_token_id, config.pad_token_id = 1, 2
    torch.manual_seed(0)
    with torch.device(row["device"]):
        causal = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    causal.save_pretrained(folder)
    # In a folder of its own: next to a configuration, transformers would take the tokenizer of the model's family.
    make_tokenizer(config.vocab_size).save_pretrained(folder / "tokenizer")
    return sum(parameter.numel() for parameter in causal.parameters())


def recipe(row: dict[str, Any], folder: Path, vocabulary: int) -> dict[str, Any]:
    (folder / "reward.py").write_text(REWARD)
    rows = [json.dumps({"question": text, "answer": "1"}) for text in questions(row, vocabulary)]
    (folder / "problems.jsonl").write_text("\n".join(rows) + "\n")
    place = folder / "model"
    model = {"path": str(place), "tokenizer": str(place / "tokenizer"), "lora": {"r": 16} if row.get("lora") else None}
    model |= {"share_prompts": row["share"]} if "share" in row else {}
    batch = {"problems": row["problems"]}
    if "budget" in row:
        batch["token_budget"] = row["budget"]
    return {
        "run": {"dir": str(folder / "run"), "device": row["device"], "tensorboard": False},
        "model": model | ({"checkpointing": row["recompute"]} if "recompute" in row else {}),
        "format": "question_only",
        "stages": {
            "grpo": {
                "kind": "rl",
                "algorithm": {"name": "grpo", "group_size": row["samples"]},
                "data": {"source": str(folder / "problems.jsonl")},
                "rewards": [f"{folder / 'reward.py'}:varies"],
                "rollout": {"max_tokens": row["new"]},
                "batch": batch,
                "optim": {"lr": 1e-6},
                "steps": row["steps"] + 1,
            }
        },
    }


class Watch:
    """Seconds that calls of some functions take, step by step."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}

    def over(self, name: str, owner: Any, function: str) -> AbstractContextManager[Any]:
        """Within `with`, the time of this function counts as `name`."""
        call = getattr(owner, function)

        def timed(*arguments: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                self.spent[name] = self.spent.get(name, 0.0) + time.perf_counter() - begin

        return mock.patch.object(owner, function, timed)


def run_lemma(row: dict[str, Any]) -> dict[str, Any]:
    import torch

    from lemma.config.load import load_values
    from lemma.core.events import Event, Measured
    from lemma.recipe import Recipe
    from lemma.runs.run import train
    from lemma.stages.reinforcement import rl_loop
    from lemma.stages.reinforcement.diagnosis import Diagnosis

    watch, steps = Watch(), []

    def hear(event: Event) -> None:
        if not isinstance(event, Measured) or event.axis != "train":
            return
        # What writing this row still takes counts for the next step, as it does for the stage's own clock.
        steps.append((dict(event.values), {**event.timings, **{f"{n}_seconds": s for n, s in watch.spent.items()}}))
        watch.spent.clear()
        if len(steps) == row["steps"]:
            raise Enough

    folder = Path(tempfile.mkdtemp())
    parameters = write_model(row, folder / "model")
    loaded = load_values(Recipe, recipe(row, folder, make_config(row["shape"]).vocab_size))
    if row["device"] == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with contextlib.ExitStack() as stack:
        for name in ("rollout_metrics", "update_metrics", "measure"):
            stack.enter_context(watch.over("metrics", rl_loop, name))
        stack.enter_context(watch.over("diagnosis", Diagnosis, "look"))
        stack.enter_context(contextlib.suppress(Enough))
        train(loaded, sink=hear)
    values, most = steps[-1][0], row["problems"] * row["samples"] * row["new"]
    sampled = values["trained_tokens"]
    assert 0.98 * most <= sampled <= most, sampled
    timings = [timing for _, timing in steps[1:] or steps]
    found = {name: statistics.median(one.get(f"{name}_seconds", 0.0) for one in timings) for name in PARTS}
    whole = statistics.median(one["seconds"] for one in timings)
    tokens = sampled + row["problems"] * row["samples"] * row["prompt"]
    result = row | {
        "seconds": whole,
        **{f"{name}_seconds": value for name, value in found.items()},
        "rest_seconds": whole - sum(found.values()),
        "first_step": steps[0][1]["seconds"],
        "tokens_per_second": sampled / found["generate"],
        "packs": values["packs"],
        "mismatch_mean": values["mismatch/mean"],
    }
    if row["device"] == "cuda":
        result["mfu"] = 6.0 * parameters * tokens / found["update"] / MATRIX_RATE
        result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return result


def run_trl(row: dict[str, Any]) -> dict[str, Any]:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.manual_seed(0)
    config = make_config(row["shape"])
    tokenizer = make_tokenizer(config.vocab_size)
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
        gradient_accumulation_steps=row["problems"] * row["samples"] // row["batch"],
        num_generations=row["samples"],
        max_completion_length=row["new"],
        learning_rate=1e-6,
        bf16=True,
        gradient_checkpointing=False,
        use_liger_kernel=row["liger"],
        max_steps=2,
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
        train_dataset=Dataset.from_list([{"prompt": text} for text in questions(row, config.vocab_size)]),
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
        {"who": "lemma"},
        {"who": "lemma", "share": False},
        {"who": "lemma", "budget": 16640, "recompute": True, "share": False},
        {"who": "lemma", "lora": True},
        {"who": "trl", "batch": 16, "liger": True},
        {"who": "trl", "batch": 16, "liger": True, "lora": True},
    ]


def table(results: list[dict[str, Any]]) -> str:
    """The results in seconds, a row each."""
    shown = ("seconds", *(f"{name}_seconds" for name in (*PARTS, "rest")), "first_step")
    lines = [
        "| " + " | ".join(["", *(name.removesuffix("_seconds") for name in shown), "MFU", "peak GiB"]) + " |",
        "|---" * (len(shown) + 3) + "|",
    ]
    for one in results:
        said = [
            f"{name} {value}"
            for name, value in one.items()
            if name in ("budget", "recompute", "share", "batch", "liger")
        ]
        name = ", ".join([one["who"], one["shape"], "LoRA" if one.get("lora") else "full weights", *said])
        if "error" in one:
            lines.append(f"| {name} | {one['error']} |")
            continue
        cells = [f"{one[key]:.3f}" if key in one else "" for key in shown]
        cells.append(f"{one['mfu']:.1%}" if "mfu" in one else "")
        cells.append(f"{one['peak_gib']:.1f}" if "peak_gib" in one else "")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    for one in results:
        if "metrics_seconds" in one:
            extra = one["metrics_seconds"] + one["diagnosis_seconds"]
            lines.append(f"metrics and diagnosis: {1000 * extra:.1f} ms a step, {extra / one['seconds']:.2%} of it")
    return "\n".join(lines)


if __name__ == "__main__":
    runners: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {"lemma": run_lemma, "trl": run_trl}
    run_rows("benchmarks.grpo_step", __doc__, runners, default_rows, options=OPTIONS, table=table)
