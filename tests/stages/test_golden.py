"""Twenty steps of training, to the last bit, against stored losses.

Bits are compared where a stored kind of CPU is really this one: the same torch, and the same bits from the operations
that a step is made of (tests/cpu_kind.py). Elsewhere losses agree to `CLOSE`. `python -m tests.stages.test_golden` in
the root of the repository stores the losses of your machine; those of other kinds stay.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from lemma.core.events import silent
from lemma.recipe import load_recipe
from lemma.runs.run import train
from tests.cpu_kind import facts, kind

STORE = Path(__file__).parents[1] / "reference" / "golden_losses.json"
# Over twelve kinds of kernels losses differ by at most 1.2e-7, a unit in the last place of float32. A rate that is
# wrong by one part in ten thousand moves them by 2e-5, an epsilon of 1e-7 instead of 1e-8 by 6e-6.
CLOSE = 1e-6
SUPERVISED = """
run: {{dir: {dir}, seed: 11, threads: 1, device: cpu, tensorboard: false}}
model: {{path: tiny, tiny: {{hidden: 48, layers: 2, feed_forward: 64}}}}
format: {{name: r1_zero, preamble: false}}
stages:
  sft:
    steps: 20
    data: {{arithmetic: {{count: 300, operations: 3}}}}
    batch: {{sequences: 8, token_budget: 256}}
    optim: {{lr: 2e-3, warmup: 4, schedule: cosine}}
"""
STAGES = {"supervised": SUPERVISED}


def losses(recipe: str, folder: Path) -> list[str]:
    """The loss of each step, as the hexadecimal notation that loses nothing."""
    path = folder / "recipe.yaml"
    path.write_text(recipe.format(dir=folder / "run"))
    threads = torch.get_num_threads()
    try:
        assert train(load_recipe(path), sink=silent) == 0
    finally:
        torch.set_num_threads(threads)
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [float(row["loss"]).hex() for row in rows if row["axis"] == "train"]


def numbers(written: list[str]) -> list[float]:
    return [float.fromhex(value) for value in written]


@pytest.mark.parametrize("stage", STAGES)
def test_losses_are_the_stored_ones(stage: str, tmp_path: Path) -> None:
    stored = json.loads(STORE.read_text())[stage]
    mine = losses(STAGES[stage], tmp_path)
    assert len(mine) == 20
    for known in stored.values():
        assert numbers(mine) == pytest.approx(numbers(known["losses"]), rel=CLOSE), known["cpu"]
    if kind() in stored:
        assert mine == stored[kind()]["losses"]


def store(table: dict[str, dict[str, Any]]) -> None:
    for name, recipe in STAGES.items():
        with tempfile.TemporaryDirectory() as folder:
            table.setdefault(name, {})[kind()] = {"cpu": facts(), "losses": losses(recipe, Path(folder))}


if __name__ == "__main__":
    written = json.loads(STORE.read_text()) if STORE.is_file() else {}
    store(written)
    STORE.write_text(json.dumps(written, indent=1) + "\n")
    sys.stdout.write(f"stored for {kind()}: {facts()}\n")
