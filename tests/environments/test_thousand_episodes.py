"""A thousand episodes at once, with slow tools, one that hangs and one that ends its process: they end with the same
tokens, rewards and weights when the run is interrupted or killed in the middle, and nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import yaml

from tests.environments.test_environment_kill import children, wait_for_end
from tests.preloaded import Python
from tests.runs.test_kill import Chain
from tests.runs.test_rl_kill import outcome

PROBLEMS, GROUP, TURNS, STEPS = 125, 8, 3, 2
TOOL = '''
import asyncio, hashlib, os
from lemma.environments import Environment, Observation, Outcome

class Slow(Environment):
    """Replies after half a second. One problem's tool never replies, another's ends its process."""

    def __init__(self, notes):
        self.notes = notes

    def reset(self, problem, seed):
        self.gold, self.total, self.turns = problem.gold, 0, 0
        self.note("+")

    def note(self, sign):
        with open(self.notes, "a") as notes:
            notes.write(sign)

    async def step(self, action):
        if self.gold == "7":
            await asyncio.sleep(600)
        if self.gold == "9":
            os._exit(3)
        await asyncio.sleep(0.5)
        self.turns += 1
        self.total += int(hashlib.sha256(action.text.encode()).hexdigest(), 16) % 1000
        return Observation("how many pens ?" if self.total % 2 else "so", done=self.turns > 1 + self.total % 3)

    def score(self):
        return Outcome(float(self.total % 2), self.total % 2 == 1)

    def close(self):
        self.note("-")
'''


def make_chain(folder: Path, tool: Path) -> Chain:
    folder.mkdir()
    rows = [{"question": f"eva has {number} pens ?", "answer": str(number)} for number in range(1, PROBLEMS + 1)]
    (folder / "problems.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    environment = {
        "name": "custom", "class": f"{tool}:Slow", "options": {"notes": str(folder / "notes")}, "turns": TURNS,
        "reply_tokens": 8, "workers": 4, "worker_calls": 256, "episodes": PROBLEMS * GROUP, "step_seconds": 20,
    }  # fmt: skip
    stage = {
        "kind": "rl", "steps": STEPS, "data": {"source": str(folder / "problems.jsonl")}, "rollout": {"max_tokens": 4},
        "environment": environment, "algorithm": {"name": "grpo", "group_size": GROUP},
        "batch": {"problems": PROBLEMS, "token_budget": 8192}, "optim": {"lr": 5e-3},
        "checkpoint": {"every": 1, "keep": 2}, "eval": {"benchmarks": []},
    }  # fmt: skip
    content = {
        "run": {"dir": str(folder / "run"), "seed": 5, "threads": 1, "device": "cpu", "tensorboard": False},
        "model": {"tiny": {"hidden": 16, "layers": 1, "feed_forward": 16, "heads": 2, "kv_heads": 1, "context": 128}},
        "format": {"name": "r1_zero", "preamble": False},
        "stages": {"rl": stage},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(content))
    return Chain(folder / "recipe.yaml", folder / "run" / "metrics.jsonl")


class Notes:
    """Environments that were begun and closed, by what each wrote."""

    def __init__(self, chain: Chain):
        self._path = chain.recipe.parent / "notes"

    def count(self, sign: str) -> int:
        return self._path.read_text().count(sign) if self._path.exists() else 0


def in_the_middle(chain: Chain, process: Python) -> set[int]:
    """Wait until all environments of a step are there; the processes below the trainer."""
    notes, begun = Notes(chain), Notes(chain).count("+")
    until = time.monotonic() + 200
    while notes.count("+") < begun + PROBLEMS * GROUP and time.monotonic() < until:
        assert process.poll() is None
        time.sleep(0.02)
    time.sleep(1.0)
    assert process.poll() is None
    return set(children(process.pid))


def follow(process: Python, notes: Notes | None = None) -> int:
    """Wait for a run that ends well and leaves no process; the most environments that were open at once."""
    most, seen = 0, set[int]()
    while process.poll() is None:
        most = max(most, notes.count("+") - notes.count("-")) if notes is not None else 0
        seen |= set(children(process.pid))
        time.sleep(0.05)
    wait_for_end(process, seen)
    assert process.returncode == 0
    return most


@pytest.mark.long
def test_a_thousand_episodes_at_once(tmp_path: Path) -> None:
    tool = tmp_path / "slow_tool.py"
    tool.write_text(TOOL)
    undisturbed = make_chain(tmp_path / "undisturbed", tool)
    assert follow(undisturbed.start(), Notes(undisturbed)) >= 0.95 * PROBLEMS * GROUP, "environments at once"
    rows, samples, files = outcome(undisturbed)
    lines = [line for step in samples.values() for line in step]
    assert len(lines) == STEPS * PROBLEMS * GROUP
    failed = [line for line in lines if "limit" in json.dumps(line)]
    assert len(failed) == 2 * GROUP * STEPS, "samples of the tool that hangs and of the one that ends its process"

    interrupted = make_chain(tmp_path / "interrupted", tool)
    process = interrupted.start()
    seen = in_the_middle(interrupted, process)
    os.kill(process.pid, signal.SIGINT)
    wait_for_end(process, seen)
    assert process.returncode == 0 and interrupted.last_step() == 1, "the step is finished and saved"
    killed = make_chain(tmp_path / "killed", tool)
    process = killed.start()
    seen = in_the_middle(killed, process)
    os.kill(process.pid, signal.SIGKILL)
    wait_for_end(process, seen)
    for chain in (interrupted, killed):
        follow(chain.start())
        again_rows, again_samples, again_files = outcome(chain)
        assert again_samples == samples
        assert again_rows == rows
        assert again_files == files
