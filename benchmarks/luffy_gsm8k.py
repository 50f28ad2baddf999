"""LUFFY and its baselines on a real model: SmolLM2-135M-Instruct as published, GSM8K's solutions as the traces.

    python -m benchmarks.luffy_gsm8k train --model FOLDER --data FOLDER --out FOLDER [--parallel 3] [--steps 50]
    python -m benchmarks.luffy_gsm8k table --out FOLDER

Every method sees as many problems (steps x 64), draws as many samples of its own (7 or 8 of each problem; supervised
fine-tuning none) and takes as many updates at the same learning rate. `train` writes a recipe for each run, trains them
side by side, then evaluates each on the whole test set, greedily. `table` prints what came of it, with paired tests.
The data folder holds gsm8k/train.jsonl and gsm8k/test.jsonl as published.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

PROBLEMS, GROUP, LONGEST = 64, 8, 256


class Trial(NamedTuple):
    """One training run: the method, its name in the table, and its seed."""

    method: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.method}-{self.seed}"


METHODS = {
    "on_policy": "on-policy RL",
    "sft": "SFT",
    "sft_then_rl": "SFT, then RL",
    "rl_sft_loss": "RL with SFT loss",
    "luffy": "LUFFY",
}
TRIALS = [
    Trial("luffy", 0), Trial("on_policy", 0), Trial("rl_sft_loss", 0), Trial("sft_then_rl", 0), Trial("sft", 0),
    Trial("luffy", 1), Trial("on_policy", 1),
]  # fmt: skip


def stages_of(method: str, steps: int, lr: float, data: Path) -> dict[str, Any]:
    """The stages of a method; SFT, then RL gives half of the steps to each."""
    source = {"source": str(data / "gsm8k" / "train.jsonl")}
    optim = {"lr": lr, "warmup": 5}
    own: dict[str, Any] = {"name": "luffy", "group_size": GROUP, "scale": "none", "entropy": 0.0}
    differences: dict[str, dict[str, Any]] = {
        "on_policy": {"prefix": {"samples": 0}},
        "sft_then_rl": {"prefix": {"samples": 0}},
        "rl_sft_loss": {"sft_weight": 1.0, "statistics": "on_policy"},
    }
    own |= differences.get(method, {})
    rl = {
        "kind": "rl", "algorithm": own, "data": source, "rewards": ["accuracy"], "optim": optim, "log_every": 1,
        "rollout": {"max_tokens": LONGEST, "engine": {"name": "native", "sequences": 512, "cache_tokens": 262144}},
        "batch": {"problems": PROBLEMS, "token_budget": 32768}, "checkpoint": {"every": 0},
        "steps": steps if method != "sft_then_rl" else steps - steps // 2,
    }  # fmt: skip
    sft = {
        "kind": "supervised", "data": source, "optim": optim, "log_every": 5, "checkpoint": {"every": 0},
        "batch": {"sequences": PROBLEMS, "token_budget": 32768},
        "steps": steps if method == "sft" else steps // 2,
    }  # fmt: skip
    return {"sft": {"sft": sft}, "sft_then_rl": {"sft": sft, "rl": rl}}.get(method, {"rl": rl})


def train(args: argparse.Namespace) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    waiting, running = list(TRIALS), dict[Trial, subprocess.Popen[bytes]]()
    begin = time.time()
    while waiting or running:
        while waiting and len(running) < args.parallel:
            trial = waiting.pop(0)
            recipe = args.out / f"{trial.name}.yaml"
            recipe.write_text(yaml.safe_dump({
                "run": {"dir": str(args.out / trial.name), "seed": trial.seed}, "model": {"path": args.model},
                "format": "boxed", "stages": stages_of(trial.method, args.steps, args.lr, args.data),
            }, sort_keys=False))  # fmt: skip
            log = (args.out / f"{trial.name}.log").open("wb")
            command = [sys.executable, "-m", "lemma", "train", str(recipe)]
            running[trial] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        for trial, process in list(running.items()):
            if process.poll() is not None:
                del running[trial]
                print(f"{time.time() - begin:.0f} s: {trial.name} ended with {process.returncode}", flush=True)
        time.sleep(0.5)
    evaluate(args)


def evaluate(args: argparse.Namespace) -> None:
    """All models in one process: starting one costs more than evaluating."""
    from lemma.cli import main as lemma

    for trial in TRIALS:
        lemma(["eval", str(args.out / trial.name), "--benchmarks", "gsm8k", "--data-dir", str(args.data),
               "--max-tokens", "320", "--to", str(args.out / "evaluations" / trial.name)])  # fmt: skip


def table(args: argparse.Namespace) -> None:
    from lemma.cli import main as lemma

    print(
        "| method | seed | test | 95% interval | right in training, first and last ten steps |\n|---|---|---|---|---|"
    )
    for trial in sorted(TRIALS, key=lambda trial: (list(METHODS).index(trial.method), trial.seed)):
        found = json.loads((args.out / "evaluations" / trial.name / "results.json").read_text())
        score = found["benchmarks"]["gsm8k"]["scores"]["avg@1"]
        right = list(_right(args.out / trial.name / "metrics.jsonl"))
        ends = [f"{sum(part) / len(part):.1%}" for part in (right[:10], right[-10:]) if part]
        print(f"| {METHODS[trial.method]} | {trial.seed} | {score['value']:.1%} | {score['low']:.1%} to "
              f"{score['high']:.1%} | {', '.join(ends) or 'samples none'} |")  # fmt: skip
    for other in [trial for trial in TRIALS if trial != TRIALS[0]]:
        lemma(["compare", *(str(args.out / "evaluations" / trial.name) for trial in (other, TRIALS[0]))])


def _right(metrics: Path) -> Iterator[float]:
    for line in metrics.read_text().splitlines():
        row = json.loads(line)
        if row["axis"] == "train" and "right" in row:
            yield row["right"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["train", "evaluate", "table"])
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--lr", type=float, default=1e-4)
    args = parser.parse_args()
    {"train": train, "evaluate": evaluate, "table": table}[args.what](args)


if __name__ == "__main__":
    main()
