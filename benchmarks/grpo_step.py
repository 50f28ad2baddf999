"""Steps of reinforcement learning, generation included, compared with TRL's trainers: time, MFU and memory.

    python -m benchmarks.grpo_step                     the set `main`, a process for each row, and a table at the end
    python -m benchmarks.grpo_step --set long ppo      other sets of rows; --help lists them
    python -m benchmarks.grpo_step --row '{...}'       one row, as JSON
    python -m benchmarks.grpo_step --set main --device cpu \
        --over '{"shape": "tiny", "problems": 2, "samples": 4, "prompt": 16, "new": 16, "batch": 4, "liger": false}'

Work: Qwen2.5 shapes (135M: SmolLM2's), random weights, 32 problems x 8 completions, prompts of 128 and completions of
512 tokens (at random weights hardly one ends before), full fine-tuning with fp32 masters or LoRA r=16, one update on
all sampled tokens, a reward that varies in every group. `algorithm: ppo`: four updates of policy and critic and a KL
to a reference, which are the defaults. Lemma runs the reinforcement stage itself, from a recipe: rewards, journal,
advantages, update, metrics and diagnosis. `metrics` is the time to compute and write the numbers of a step, `diagnosis`
the time to look at them; both are part of `seconds`, and `rest` is what no other column names.
MFU of the update = 6 x parameters x tokens / seconds / 790 TFLOP/s (measured on an H200); recomputation is not
counted as work, and a prompt that is computed once for all of its completions counts as often as it is learnt from.
Seconds are medians of all steps but the first, and `spread` is (max - min) / median of these.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.grpo_work import (
    Row,
    Watch,
    config_of,
    floors,
    made_in_memory,
    make_tokenizer,
    memory_limited,
    parameters_of,
    questions,
    random_model,
    recipe,
    write_model,
)
from benchmarks.ppo_trl import run_trl_ppo
from benchmarks.rows import run_rows, spread, trouble
from benchmarks.sft_step import MATRIX_RATE

OPTIONS = {"shape": "1.5B", "problems": 32, "samples": 8, "prompt": 128, "new": 512, "steps": 4, "device": "cuda"}
PARTS = ("generate", "grade", "score", "update", "metrics", "diagnosis")
# Of `score` and `update`, where there is a critic.
PPO_PARTS = ("old_logprobs", "reference", "values", "policy_update", "critic_update")


class Enough(Exception):
    """Raised after the last measured step: what a run saves at its end is not part of a step."""


def run_lemma(row: Row) -> Row:
    import torch

    from lemma.config.load import load_values
    from lemma.core.events import Event, Measured
    from lemma.recipe import Recipe
    from lemma.runs.run import train

    watch, steps = Watch(), []

    def hear(event: Event) -> None:
        if not isinstance(event, Measured) or event.axis != "train":
            return
        # What writing this row still takes counts for the next step, as it does for the stage's own clock.
        steps.append((dict(event.values), {**event.timings, **{f"{n}_seconds": s for n, s in watch.spent.items()}}))
        watch.spent.clear()
        if len(steps) == row["steps"]:
            raise Enough

    folder, config = Path(tempfile.mkdtemp()), config_of(row)
    write_model(row, folder / "model")
    loaded = load_values(Recipe, recipe(row, folder, config.vocab_size))
    with contextlib.ExitStack() as stack:
        stack.enter_context(memory_limited(row.get("memory_gib")))
        stack.enter_context(made_in_memory(row["device"]))
        for place in watched(watch):
            stack.enter_context(place)
        stack.enter_context(contextlib.suppress(Enough))
        train(loaded, sink=hear)
    result = row | lemma_result(row, steps, config)
    if row["device"] == "cuda":
        result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        result["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
    return result


def watched(watch: Watch) -> list[contextlib.AbstractContextManager[Any]]:
    """Measure parts of a step that the stage's own clock does not separate."""
    from lemma.learning.learner import Learner
    from lemma.models.critic import Critic
    from lemma.runs.stage import Stage
    from lemma.stages.reinforcement import rl_loop
    from lemma.stages.reinforcement.diagnosis import Diagnosis

    def who_scores(learner: Learner, trajectories: Any, policy: Any = None, **named: Any) -> str:
        return "values" if isinstance(learner.policy, Critic) else "old_logprobs" if policy is None else "reference"

    def who_learns(learner: Learner, *arguments: Any, **named: Any) -> str:
        return "critic_update" if isinstance(learner.policy, Critic) else "policy_update"

    return [
        *(watch.over("metrics", rl_loop, name) for name in ("rollout_metrics", "update_metrics")),
        watch.over("metrics", Stage, "measure"),
        watch.over("diagnosis", Diagnosis, "look"),
        watch.over(who_scores, Learner, "score"),
        watch.over(who_learns, Learner, "step"),
    ]


def lemma_result(row: Row, steps: list[tuple[Row, Row]], config: Any) -> Row:
    """Medians of all steps but the first."""
    values, most = steps[-1][0], row["problems"] * row["samples"] * row["new"]
    updates, parameters = int(values["updates"]), parameters_of(config)
    sampled = values["trained_tokens"] / updates
    # With random weights, an answer ends about once per vocabulary-size tokens.
    assert 0.9 * most <= sampled <= most, sampled
    timings = [timing for _, timing in steps[1:] or steps]
    has_critic = row.get("algorithm") == "ppo"
    found = {
        name: statistics.median(one.get(f"{name}_seconds", 0.0) for one in timings)
        for name in (*PARTS, *(PPO_PARTS if has_critic else ()))
    }
    whole = statistics.median(one["seconds"] for one in timings)
    result = {
        "seconds": whole,
        "spread": spread([one["seconds"] for one in timings]),
        **{f"{name}_seconds": value for name, value in found.items()},
        "rest_seconds": whole - sum(found[name] for name in PARTS),
        "first_step": steps[0][1]["seconds"],
        "tokens_per_second": sampled / found["generate"],
        "sampled_tokens": sampled,
        "packs": values["packs"],
        "mismatch_mean": values["mismatch/mean"],
        **floors(row, config, parameters, updates),
    }
    if row["device"] == "cuda":
        tokens = updates * (sampled + row["problems"] * row["samples"] * row["prompt"])
        seconds = found["policy_update" if has_critic else "update"]
        result["mfu"] = 6.0 * parameters * tokens / seconds / MATRIX_RATE
    return result


def run_trl(row: Row) -> Row:
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.manual_seed(0)
    config, on_gpu = config_of(row), row["device"] == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    model = random_model(config, row["device"], dtype=dtype, attn_implementation="sdpa")
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
        bf16=on_gpu,
        use_cpu=not on_gpu,
        gradient_checkpointing=False,
        use_liger_kernel=row["liger"],
        max_steps=row["steps"],
        logging_steps=100,
        save_strategy="no",
        report_to=[],
        beta=0.0,
        temperature=1.0,
    )
    times: list[float] = []

    class Timer(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            wait(on_gpu)
            self.begin = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            wait(on_gpu)
            times.append(time.perf_counter() - self.begin)

    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        return [float(len(text) % 7) for text in completions]

    trainer = GRPOTrainer(
        model=model,
        args=arguments,
        reward_funcs=reward,
        train_dataset=Dataset.from_list([{"prompt": text} for text in questions(row, config.vocab_size)]),
        processing_class=make_tokenizer(config.vocab_size),
        peft_config=peft,
        callbacks=[Timer()],
    )
    trainer.train()
    timed = times[1:] or times
    result = row | {"seconds": statistics.median(timed), "spread": spread(timed), "first_step": times[0]}
    return result | ({"peak_gib": torch.cuda.max_memory_allocated() / 2**30} if on_gpu else {})


def wait(on_gpu: bool) -> None:
    import torch

    if on_gpu:
        torch.cuda.synchronize()


SETS: dict[str, list[Row]] = {
    "main": [
        {"who": "lemma"},
        {"who": "lemma", "share": False},
        {"who": "lemma", "lora": True},
        {"who": "trl", "batch": 32, "liger": True, "limit": 210},
    ],
    "long": [{"who": "lemma", "problems": 8, "samples": 8, "new": 8064, "limit": 330}],
    "small": [
        {"who": "lemma", "shape": "135M", "problems": 64, "samples": 16, "prompt": 120, "new": 157},
        {"who": "lemma", "shape": "135M", "problems": 64, "samples": 16, "prompt": 120, "new": 95},
        {"who": "lemma", "shape": "0.5B"},
    ],
    "seven": [
        {"who": "lemma", "shape": "7B", "lora": True, "limit": 200},
        {"who": "lemma", "shape": "7B", "optim": "adamw_8bit", "memory_gib": 120, "limit": 330},
    ],
    "ppo": [
        {"who": "lemma", "algorithm": "ppo", "problems": 64, "samples": 1},
        {"who": "trl_ppo", "algorithm": "ppo", "problems": 64, "samples": 1, "batch": 8, "steps": 2, "limit": 240},
        {"who": "lemma", "algorithm": "ppo", "limit": 240},
    ],
    "recomputed": [{"who": "lemma", "budget": 16640, "recompute": True, "share": False}],
    "trl": [
        {"who": "trl", "batch": 16, "liger": True},
        {"who": "trl", "batch": 16, "liger": True, "lora": True},
    ],
}
SAID = ("algorithm", "optim", "memory_gib", "budget", "recompute", "share", "batch", "liger")


def table(results: list[Row]) -> str:
    """The results in seconds, a row each."""
    parts = (*PARTS, "rest", *(PPO_PARTS if any(one.get("algorithm") == "ppo" for one in results) else ()))
    shown = ("seconds", *(f"{name}_seconds" for name in parts), "first_step")
    heads = [*(name.removesuffix("_seconds") for name in shown), "spread", "MFU", "peak GiB", "floors"]
    lines = ["| " + " | ".join(["", *heads]) + " |", "|---" * (len(heads) + 1) + "|"]
    for one in results:
        said = [f"{name} {one[name]}" for name in SAID if name in one]
        work = f"{one['problems']} x {one['samples']} x ({one['prompt']} + {one['new']})"
        name = ", ".join([one["who"], one["shape"], "LoRA" if one.get("lora") else "full weights", work, *said])
        if "error" in one:
            lines.append(f"| {name} | {trouble(one)} |" + " |" * (len(heads) - 1))
            continue
        cells = [f"{one[key]:.3f}" if key in one else "" for key in shown]
        cells += [f"{one[key]:.1%}" if key in one else "" for key in ("spread", "mfu")]
        cells.append(f"{one['peak_gib']:.1f}" if "peak_gib" in one else "")
        least = ("floor_generate_bytes_seconds", "floor_generate_matrix_seconds", "floor_update_seconds")
        cells.append(" / ".join(f"{one[key]:.2f}" for key in least if key in one))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines.append("\nFloors: bytes of decoding / matrix work of generating / matrix work of the update, in seconds.")
    for one in results:
        if "metrics_seconds" in one:
            extra = one["metrics_seconds"] + one["diagnosis_seconds"]
            lines.append(f"metrics and diagnosis: {1000 * extra:.1f} ms a step, {extra / one['seconds']:.2%} of it")
    return "\n".join(lines)


if __name__ == "__main__":
    runners: dict[str, Callable[[Row], Row]] = {"lemma": run_lemma, "trl": run_trl, "trl_ppo": run_trl_ppo}
    run_rows("benchmarks.grpo_step", __doc__, runners, SETS, options=OPTIONS, table=table)
