"""Kill a run of all preference algorithms again and again; it ends with the metrics and weights of one never killed."""

from __future__ import annotations

import json
from itertools import cycle
from pathlib import Path

from tests.runs.test_kill import Chain

RECIPE = """
run: {{dir: {dir}, seed: 3, threads: 1, device: cpu, tensorboard: false}}
model: {{path: tiny, tiny: {{hidden: 32, layers: 2, feed_forward: 48}}}}
format: {{name: r1_zero, preamble: false}}
stages:
"""
STAGE = """
  {name}:
    kind: preference
    algorithm: {algorithm}
    steps: 5
    data: {{arithmetic: {{count: 40, operations: 2}}, cache: {cache}}}
    batch: {{examples: 6, token_budget: 256}}
    optim: {{lr: 2e-3}}
    checkpoint: {{every: 2}}
    validation: {{share: 0.1, every: 3}}
"""
ALGORITHMS = {
    "dpo": "{name: dpo, loss: {sigmoid: 1.0, bco: 1.0}, weighting: true, nll: 0.1}",
    "kto": "kto",
    "cpo": "cpo",
    "simpo": "simpo",
    "orpo": "orpo",
}
FAULTS = ("stage.step_end:3", "jsonl.mid_line:4", "checkpoint.before_rename:2", "checkpoint.mid_write:2")


def make_chain(folder: Path) -> Chain:
    folder.mkdir()
    stages = [STAGE.format(name=name, algorithm=what, cache=folder / "cache") for name, what in ALGORITHMS.items()]
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(dir=folder / "run") + "".join(stages))
    return Chain(recipe, folder / "run" / "metrics.jsonl")


def outcome(chain: Chain) -> tuple[list[dict[str, object]], dict[str, bytes]]:
    """Every metric but timings, and every byte of models and states."""
    rows = [json.loads(line) for line in chain.metrics.read_text().splitlines()]
    for row in rows:
        row.pop("timings")
    folder = chain.metrics.parent / "stages"
    return rows, {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.safetensors")}


def test_kills_change_nothing(tmp_path: Path) -> None:
    undisturbed = make_chain(tmp_path / "undisturbed")
    whole = undisturbed.start()
    assert whole.wait(500) == 0
    rows, files = outcome(undisturbed)
    assert {row["stage"] for row in rows} == set(ALGORITHMS)

    chain = make_chain(tmp_path / "killed")
    died_in = []
    for fault in cycle(FAULTS):
        if not chain.die_at(fault):
            break
        whole_rows = chain.metrics.read_text().split("\n")[:-1]
        died_in.append(json.loads(whole_rows[-1])["stage"] if whole_rows else "dpo")
    assert set(died_in) == set(ALGORITHMS), "every algorithm is killed at least once"
    assert outcome(chain) == (rows, files)
