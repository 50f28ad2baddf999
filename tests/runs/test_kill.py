"""Kill a real training process with SIGKILL again and again, start the same command each time, and end with the very
metrics and weights of a run that was never killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from lemma.core.random import stream
from tests.preloaded import Python

RECIPE = """
run: {{dir: {dir}, seed: 3, threads: 1, device: cpu, tensorboard: false}}
model: {{path: tiny, tiny: {{hidden: 32, layers: 2, feed_forward: 48}}{lora}}}
format: {{name: r1_zero, preamble: false}}
stages:
  sft:
    steps: {steps}
    data: {{arithmetic: {{count: 150, operations: 2}}}}
    batch: {{sequences: 6, token_budget: 128}}
    optim: {{lr: 2e-3, warmup: 5, schedule: cosine, weight_decay: 0.01}}
    checkpoint: {{every: 4, keep: 2}}
    validation: {{share: 0.1, every: 7}}
"""
LORA = ", lora: {r: 4, dropout: 0.1}"
WHOLE = ", lora: {r: 4, dropout: 0.1, modules_to_save: [embed_tokens, norm]}"

# Where a process may die: while a checkpoint is written, before it is synced, between renames, while old ones are
# removed, in the middle of a line of metrics, between steps. The number is the visit; each is reached after a step.
FAULTS = (
    "checkpoint.mid_write:1",
    "checkpoint.before_sync:1",
    "checkpoint.before_rename:1",
    "checkpoint.after_rename:1",
    "checkpoint.pruning:1",
    "jsonl.mid_line:3",
    "stage.step_end:2",
    "checkpoint.before_sync:2",
)


@dataclass
class Chain:
    """Starts the same command over and over in one run folder."""

    recipe: Path
    metrics: Path

    def start(self, fault: str = "") -> Python:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return Python(["-m", "lemma", "train", self.recipe], env=os.environ | {"LEMMA_FAULT": fault}, **quiet)

    def rows(self) -> int:
        return self.metrics.read_bytes().count(b"\n") if self.metrics.is_file() else 0

    def last_step(self) -> int:
        whole = self.metrics.read_text().split("\n")[:-1] if self.metrics.is_file() else []
        return max((json.loads(row)["step"] for row in whole), default=0)

    def kill_after(self, steps: int, delay: float) -> bool:
        """Kill the process once it has made `steps` steps since its start; False where it finished before."""
        process = self.start()
        first: int | None = None
        while process.poll() is None:
            # The process cuts rows of lost steps when it starts, so the count falls once before it grows.
            rows = self.rows()
            first = rows if first is None or rows < first else first
            if rows - first >= steps:
                time.sleep(delay)
                process.kill()
                break
            time.sleep(0.002)
        return process.wait(500) == -signal.SIGKILL

    def die_at(self, fault: str) -> bool:
        process = self.start(fault)
        return process.wait(500) == -signal.SIGKILL


def make_chain(folder: Path, steps: int, lora: str) -> Chain:
    folder.mkdir()
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(dir=folder / "run", steps=steps, lora=lora))
    return Chain(recipe, folder / "run" / "metrics.jsonl")


def outcome(chain: Chain) -> tuple[list[dict[str, object]], dict[str, bytes]]:
    """Every metric but timings, and every byte of the final model and of the state it was made from."""
    rows = [json.loads(line) for line in chain.metrics.read_text().splitlines()]
    for row in rows:
        row.pop("timings")
    stage = chain.metrics.parent / "stages" / "sft"
    files = [*(stage / "final").rglob("*.safetensors"), *(stage / "checkpoints").rglob("*.safetensors")]
    return rows, {str(path.relative_to(stage)): path.read_bytes() for path in files}


def run_chain(tmp_path: Path, kills: int, steps: int, lora: str, seed: int, at_faults_every: int = 3) -> None:
    """`kills` deaths, one in `at_faults_every` at a fault point and the others at any instant."""
    undisturbed = make_chain(tmp_path / "undisturbed", steps, lora)
    whole = undisturbed.start()
    assert whole.wait(500) == 0

    chain = make_chain(tmp_path / "killed", steps, lora)
    chance = stream(seed, "kills")
    counted, at_faults = 0, 0
    while counted < kills:
        if counted % at_faults_every == at_faults_every // 2:
            killed = chain.die_at(FAULTS[at_faults % len(FAULTS)])
            at_faults += killed
        else:
            killed = chain.kill_after(int(chance.integers(1, 7)), float(chance.random()) * 0.03)
        assert killed, f"the run ended after {counted} kills: give it more steps"
        counted += 1
    assert at_faults >= min(6, kills // at_faults_every)
    last = chain.start()
    assert last.wait(500) == 0

    (rows, files), (true_rows, true_files) = outcome(chain), outcome(undisturbed)
    assert rows == true_rows
    assert files.keys() == true_files.keys()
    for name, content in true_files.items():
        assert files[name] == content, f"{name} differs"


def test_a_death_at_each_fault_point_changes_nothing(tmp_path: Path) -> None:
    run_chain(tmp_path, kills=len(FAULTS), steps=60, lora="", seed=0, at_faults_every=1)


@pytest.mark.kill
def test_twenty_kills_change_nothing(tmp_path: Path) -> None:
    run_chain(tmp_path, kills=20, steps=400, lora="", seed=0)


def test_a_death_changes_nothing_where_layers_are_trained_whole(tmp_path: Path) -> None:
    undisturbed, chain = (make_chain(tmp_path / name, 10, WHOLE) for name in ("undisturbed", "killed"))
    whole = undisturbed.start()
    assert chain.die_at("stage.step_end:6")
    again = chain.start()
    for process in (whole, again):
        assert process.wait(500) == 0
    assert outcome(chain) == outcome(undisturbed)


@pytest.mark.kill
@pytest.mark.parametrize("lora", ["", LORA], ids=["full", "lora"])
def test_a_hundred_kills_change_nothing(tmp_path: Path, lora: str) -> None:
    run_chain(tmp_path, kills=100, steps=900, lora=lora, seed=1)


def test_a_death_before_the_final_rename_loses_nothing(tmp_path: Path) -> None:
    chain = make_chain(tmp_path / "run", 6, "")
    assert chain.die_at("stage.before_final_rename:1")
    assert not (chain.metrics.parent / "stages" / "sft" / "final").exists()
    again = chain.start()
    assert again.wait(500) == 0
    assert (chain.metrics.parent / "stages" / "sft" / "final" / "model.safetensors").is_file()
