"""Kill the trainer and the workers of its environment at random instants, start the same command each time, and end
with the very tokens, rewards and weights of a run that was never killed. No process is left, whoever was killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import pytest
import yaml

from lemma.core.random import stream
from tests.environments.lingering import write_lingering
from tests.preloaded import Python
from tests.runs.test_kill import Chain
from tests.runs.test_rl_kill import outcome


def make_chain(folder: Path, place: str, steps: int) -> Chain:
    folder.mkdir()
    rows = [{"question": f"eva has {number} pens ?", "answer": str(number)} for number in range(1, 9)]
    (folder / "problems.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    stage = {
        "kind": "rl", "steps": steps, "data": {"source": str(folder / "problems.jsonl")}, "rollout": {"max_tokens": 4},
        "environment": {"name": "custom", "class": place, "options": {"most": 0.03}, "turns": 3, "reply_tokens": 8},
        "algorithm": {"name": "grpo", "group_size": 4}, "batch": {"problems": 4, "token_budget": 512},
        "optim": {"lr": 5e-3}, "checkpoint": {"every": 2, "keep": 2}, "eval": {"benchmarks": []},
    }  # fmt: skip
    content = {
        "run": {"dir": str(folder / "run"), "seed": 5, "threads": 1, "device": "cpu", "tensorboard": False},
        "model": {"tiny": {"hidden": 16, "layers": 1, "feed_forward": 16, "heads": 2, "kv_heads": 1, "context": 128}},
        "format": {"name": "r1_zero", "preamble": False},
        "stages": {"rl": stage},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(content))
    return Chain(folder / "recipe.yaml", folder / "run" / "metrics.jsonl")


def children(pid: int) -> list[int]:
    """All processes below this one."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(child) for child in task.read_text().split()]
        except OSError:
            continue
    return found + [one for child in found for one in children(child)]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for_end(process: Python, others: set[int]) -> None:
    process.wait(300)
    until = time.monotonic() + 20
    while any(map(alive, others)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not [pid for pid in others if alive(pid)], "a process outlives its trainer"


def disturb(chain: Chain, first: float, second: float, chance: float) -> int:
    """Kill one of the workers and then the trainer, so many seconds after workers are there; how many were killed."""
    process = chain.start()
    seen: set[int] = set()
    killed = 0
    until = time.monotonic() + 120
    while process.poll() is None and len(seen) < 4 and time.monotonic() < until:
        seen |= set(children(process.pid))
        time.sleep(0.005)
    time.sleep(first)
    workers = children(process.pid)
    if workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(workers[int(chance * len(workers))], signal.SIGKILL)
            killed += 1
    until = time.monotonic() + second
    while time.monotonic() < until:
        seen |= set(children(process.pid))
        time.sleep(0.005)
    if process.poll() is None:
        seen |= set(children(process.pid))
        os.kill(process.pid, signal.SIGKILL)
        killed += 1
    wait_for_end(process, seen)
    return killed


def stop(chain: Chain) -> None:
    """Ask the trainer to stop once it has workers; it finishes its step, and none is left."""
    process = chain.start()
    seen: set[int] = set()
    while process.poll() is None and not seen:
        seen |= set(children(process.pid))
        time.sleep(0.005)
    if process.poll() is None:
        os.kill(process.pid, signal.SIGTERM)
    wait_for_end(process, seen)
    assert process.returncode == 0


def run_chain(folder: Path, kills: int, steps: int, seed: int) -> None:
    place = write_lingering(folder)
    undisturbed = make_chain(folder / "undisturbed", place, steps)
    whole = undisturbed.start()
    assert whole.wait(300) == 0
    chance = stream(seed, "kills of workers")
    killed = number = 0
    while killed < kills:
        chain = make_chain(folder / f"killed-{number}", place, steps)
        number += 1
        for _ in range(2 if kills > 2 else 1):
            killed += disturb(chain, float(chance.random()) * 0.4, float(chance.random()) * 0.4, float(chance.random()))
        if kills > 2:
            stop(chain)
        last = chain.start()
        assert last.wait(300) == 0
        rows, samples, files = outcome(chain)
        true_rows, true_samples, true_files = outcome(undisturbed)
        assert samples == true_samples
        assert rows == true_rows
        assert files.keys() == true_files.keys() and all(files[name] == true_files[name] for name in files)


def test_whoever_dies_nothing_changes_and_nothing_is_left(tmp_path: Path) -> None:
    run_chain(tmp_path, kills=2, steps=3, seed=1)


@pytest.mark.kill
def test_twenty_deaths(tmp_path: Path) -> None:
    run_chain(tmp_path, kills=20, steps=6, seed=2)
