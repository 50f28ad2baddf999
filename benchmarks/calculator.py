"""A tiny model learns to call the calculator of the environment `python`: accuracy and calls, with and without it.

    python -m benchmarks.calculator            benchmarks/calculator.yaml under its seed, a few minutes on one core
    python -m benchmarks.calculator --seed 2   another seed

The demonstrations teach the syntax of a call and of an answer. Half of them call the calculator once for each step of
the problem, half answer directly. Which of the two pays off is left to reinforcement learning.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean
from typing import Any

from lemma.core.types import Demonstration
from lemma.data.arithmetic import generate, parse
from lemma.data.data_options import ArithmeticOptions
from lemma.recipe import load_recipe
from lemma.runs.run import train

RECIPE = Path(__file__).with_suffix(".yaml")
DEMONSTRATIONS = 1000
OPERATIONS = 3
STEPS = 5


def conversation(item: Demonstration, is_called: bool) -> list[dict[str, str]]:
    """The problem solved with calls, one for each step, or answered directly."""
    turns = [{"role": "user", "content": item.problem.question}]
    total, steps = parse(item.problem.question)
    for sign, amount, after in steps if is_called else ():
        turns += [
            {"role": "assistant", "content": f"<code> {total} {sign} {amount} </code>"},
            {"role": "user", "content": str(after)},
        ]
        total = after
    return [*turns, {"role": "assistant", "content": f"</think> <answer> {item.answer} </answer>"}]


def write_demonstrations(path: Path, seed: int) -> None:
    items = generate(ArithmeticOptions(operations=OPERATIONS, seed=seed), "train", 0, DEMONSTRATIONS)
    rows = [{"messages": conversation(item, number % 2 == 0)} for number, item in enumerate(items)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def ends(rows: list[dict[str, Any]], name: str) -> tuple[float, float]:
    """The mean of the first and of the last few steps."""
    values = [row.get(name, 0.0) for row in rows]
    return fmean(values[:STEPS]), fmean(values[-STEPS:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as `lemma train` takes it")
    wanted = parser.parse_args()
    folder = Path(f"runs/calculator_{wanted.seed}")
    data = folder.with_name(f"{folder.name}.jsonl")
    write_demonstrations(data, wanted.seed)
    changes = [f"run.dir={folder}", f"run.seed={wanted.seed}", f"stages.sft.data.source={data}", *wanted.set]
    recipe = load_recipe(str(RECIPE), changes)
    assert train(recipe, sink=lambda event: None) == 0
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    for stage in ("with_calculator", "without"):
        own = [row for row in rows if row["stage"] == stage and row["axis"] == "train"]
        (first, last), (few, many) = ends(own, "reward/mean"), ends(own, "calls/mean")
        bad = ends(own, "calls/bad_share")
        print(
            f"{stage}: right {first:.2f} -> {last:.2f}, calls per episode {few:.2f} -> {many:.2f}, "
            f"calls that could not be made {bad[0]:.3f} -> {bad[1]:.3f}"
        )


if __name__ == "__main__":
    main()
