"""A GRPO step on real work, the start and the end of the run included: Lemma, TRL with vLLM in its process, TRL alone,
vLLM alone.

    python -m benchmarks.real_step --model FOLDER --questions FILE                all rows, a process each, and a table
    python -m benchmarks.real_step --model FOLDER --questions FILE --set lemma    Lemma alone

FOLDER holds an instruct model; the committed table is of Qwen2.5-Coder-1.5B-Instruct. FILE has a `question` and an
`answer` in each line; the table is of the first 1,024 training problems of GSM8K. Work: 32 problems x 8 samples a step,
temperature 1, at most 1,024 tokens, one update, no KL term; the reward is whether the answer in the box is right.
Samples are ragged, and every program draws its own: `mean_tokens` says how long they were.

`seconds` is the median of the steps after the first. Of Lemma, which is run as the command `lemma train`,
`first_step_at` counts from the command to the end of the first step, and `end` from the end of the last step to the
prompt; the last checkpoint and the model are written in that time.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.rows import Row, run_rows, spread, trouble

ASKED = " Please reason step by step, and put your final answer within \\boxed{}."
BOXED = re.compile(r"\\boxed\{\s*\$?(-?[\d,]*\.?\d+)")
OPTIONS = {
    **{"model": "", "questions": "", "device": "cuda"},
    **{"problems": 32, "samples": 8, "new": 1024, "steps": 8},
}
LEMMA: list[Row] = [
    {"who": "lemma"},
    {"who": "lemma", "lora": True},
]
# What fits beside the other half of the program: 32 sequences at a time run out of memory with vLLM in the process.
PEERS: list[Row] = [
    {"who": "trl", "vllm": True, "batch": 8, "steps": 6, "limit": 240},
    {"who": "trl", "batch": 32, "steps": 3, "limit": 240},
    {"who": "vllm", "steps": 4},
]


def rows_of(row: Row) -> list[dict[str, str]]:
    """The problems, with the sentence that asks for a box."""
    lines = Path(row["questions"]).read_text(encoding="utf-8").splitlines()[:1024]
    items = [json.loads(line) for line in lines]
    return [{"question": item["question"] + ASKED, "answer": str(item["answer"])} for item in items]


def recipe(row: Row, folder: Path) -> Row:
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(item) + "\n" for item in rows_of(row)), encoding="utf-8")
    stage = {
        "kind": "rl",
        "algorithm": {"name": "grpo", "group_size": row["samples"]},
        "data": {"source": str(data)},
        "rewards": ["accuracy"],
        "rollout": {"temperature": 1.0, "max_tokens": row["new"]},
        "batch": {"problems": row["problems"]},
        "steps": row["steps"],
        "optim": {"lr": 2e-5 if row.get("lora") else 1e-6, "schedule": "constant"},
        "checkpoint": {"every": 0},
    }
    model = {"path": row["model"], **({"lora": {"r": 16, "alpha": 32}} if row.get("lora") else {})}
    run = {"dir": str(folder / "run"), "seed": 1, "device": row["device"]}
    return {"run": run, "model": model, "format": "chat", "stages": {"grpo": stage}}


class StepTimes:
    """When each row of a run's metrics was there, in seconds since this was made."""

    def __init__(self, metrics: Path):
        self.begin = time.perf_counter()
        self.times: list[float] = []
        self._metrics, self._is_over = metrics, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def stop(self) -> float:
        self._is_over.set()
        self._thread.join()
        return time.perf_counter() - self.begin

    def _look(self) -> None:
        while not self._is_over.wait(0.02):
            rows = self._metrics.read_bytes().count(b"\n") if self._metrics.exists() else 0
            self.times += [time.perf_counter() - self.begin] * (rows - len(self.times))


def run_lemma(row: Row) -> Row:
    with tempfile.TemporaryDirectory() as folder:  # a checkpoint of 1.5B has 18 GB
        return _run_lemma(row, Path(folder))


def _run_lemma(row: Row, folder: Path) -> Row:
    (folder / "recipe.yaml").write_text(json.dumps(recipe(row, folder)), encoding="utf-8")
    metrics = folder / "run" / "metrics.jsonl"
    watch = StepTimes(metrics)
    done = subprocess.run([sys.executable, "-m", "lemma", "train", str(folder / "recipe.yaml")], stderr=subprocess.PIPE)
    whole = watch.stop()
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    steps = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    timed = [step["timings"] for step in steps[1:]]
    parts = {name: statistics.median(one[f"{name}_seconds"] for one in timed) for name in ("generate", "update")}
    seconds = [one["seconds"] for one in timed]
    return row | parts | {
        "seconds": statistics.median(seconds),
        "spread": spread(seconds),
        "mean_tokens": statistics.mean(step["length/mean"] for step in steps[1:]),
        "first_step_at": watch.times[0],
        "end": whole - watch.times[-1],
        "whole": whole,
        "peak_gib": max((one.get("peak_memory_gib", 0.0) for one in timed), default=0.0) or None,
    }  # fmt: skip


def last_number(text: str) -> str | None:
    found = BOXED.findall(text)
    return found[-1].replace(",", "") if found else None


def run_trl(row: Row) -> Row:
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    on_gpu = row["device"] == "cuda"
    vllm = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.25} if row.get("vllm") else {}
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=row["batch"],
        gradient_accumulation_steps=row["problems"] * row["samples"] // row["batch"],
        num_generations=row["samples"],
        max_completion_length=row["new"],
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        bf16=on_gpu,
        use_cpu=not on_gpu,
        gradient_checkpointing=False,
        max_steps=row["steps"],
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        beta=0.0,
        temperature=1.0,
        model_init_kwargs={"dtype": "bfloat16" if on_gpu else "float32", "attn_implementation": "sdpa"},
        **vllm,
    )
    times: list[float] = []

    class Timer(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.begin = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            if on_gpu:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - self.begin)

    def reward(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        return [float(last_number(text) == gold.replace(",", "")) for text, gold in zip(texts, answer, strict=True)]

    items = [
        {"prompt": [{"role": "user", "content": item["question"]}], "answer": item["answer"]} for item in rows_of(row)
    ]
    trainer = GRPOTrainer(
        model=row["model"],
        args=arguments,
        reward_funcs=reward,
        train_dataset=Dataset.from_list(items),
        callbacks=[Timer()],
    )
    trainer.train()
    lengths = [entry["completions/mean_length"] for entry in trainer.state.log_history if "step_time" in entry]
    timed = times[1:] or times
    result = {"seconds": statistics.median(timed), "spread": spread(timed), "mean_tokens": statistics.mean(lengths)}
    return row | result | ({"peak_gib": torch.cuda.max_memory_allocated() / 2**30} if on_gpu else {})


def run_vllm(row: Row) -> Row:
    """Generation alone: the same prompts, as many steps."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams

    engine = LLM(model=row["model"], max_model_len=2 * row["new"], gpu_memory_utilization=0.6, seed=0)
    tokenizer, times, lengths = engine.get_tokenizer(), [], []
    texts = [item["question"] for item in rows_of(row)]
    sampling = SamplingParams(n=row["samples"], temperature=1.0, max_tokens=row["new"], logprobs=0)
    for step in range(row["steps"]):
        chosen = texts[step * row["problems"] : (step + 1) * row["problems"]]
        chats = [[{"role": "user", "content": text}] for text in chosen]
        prompts = [
            {"prompt_token_ids": tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)}
            for chat in chats
        ]
        begin = time.perf_counter()
        answers = engine.generate(prompts, sampling, use_tqdm=False)
        times.append(time.perf_counter() - begin)
        lengths += [len(sample.token_ids) for answer in answers for sample in answer.outputs]
    timed = times[1:] or times
    return row | {"generate": statistics.median(timed), "mean_tokens": statistics.mean(lengths)}


def name_of(result: Row) -> str:
    names = {"lemma": "Lemma", "trl": "TRL", "vllm": "vLLM, generation alone"}
    return (
        names[result["who"]] + (", LoRA" if result.get("lora") else "") + (" with vLLM" if result.get("vllm") else "")
    )


def table(results: list[Row]) -> str:
    columns = ("seconds", "spread", "generate", "update", "mean_tokens", "first_step_at", "end", "whole", "peak_gib")
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for result in results:
        if "error" in result:
            lines.append(f"| {name_of(result)} | {trouble(result)} |" + " |" * (len(columns) - 1))
            continue
        cells = [f"{result[name]:.2f}" if result.get(name) is not None else "" for name in columns]
        lines.append(f"| {name_of(result)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    run_rows(
        "benchmarks.real_step",
        __doc__,
        {"lemma": run_lemma, "trl": run_trl, "vllm": run_vllm},
        {"all": LEMMA + PEERS, "lemma": LEMMA, "peers": PEERS},
        options=OPTIONS,
        table=table,
    )
