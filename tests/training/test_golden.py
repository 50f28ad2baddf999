"""Twenty steps of every stage, to the last bit, against stored losses.

Bits depend on the instruction set and the torch build, so values are stored under both; on a machine that has none
stored, the nearest ones must agree to seven digits. `python tests/training/test_golden.py` writes this machine's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from lemma.core.events import silent
from lemma.recipe import load_recipe
from lemma.training.run import train

STORE = Path(__file__).parents[1] / "reference" / "golden_losses.json"
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


def machine() -> str:
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"


@pytest.mark.parametrize("stage", STAGES)
def test_losses_are_the_stored_ones(stage: str, tmp_path: Path) -> None:
    stored = json.loads(STORE.read_text())[stage]
    mine = losses(STAGES[stage], tmp_path)
    assert len(mine) == 20
    if machine() in stored:
        assert mine == stored[machine()]
    else:
        others = [float.fromhex(value) for value in next(iter(stored.values()))]
        assert [float.fromhex(value) for value in mine] == pytest.approx(others, rel=1e-5)


if __name__ == "__main__":
    import tempfile

    table = json.loads(STORE.read_text()) if STORE.is_file() else {}
    for name, text in STAGES.items():
        with tempfile.TemporaryDirectory() as place:
            table.setdefault(name, {})[machine()] = losses(text, Path(place))
    STORE.write_text(json.dumps(table, indent=1) + "\n")
    sys.stdout.write(f"stored for {machine()}\n")
