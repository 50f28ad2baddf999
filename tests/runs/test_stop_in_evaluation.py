"""A stop during an evaluation or a precomputation does not wait for its end, and changes nothing in what comes out."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from lemma.core.events import Event, Progressed
from lemma.learning.learner import Learner
from lemma.runs.run import train
from lemma.stages.preference import scores
from tests.algorithms import toy
from tests.stages.preference_world import World as PreferenceWorld
from tests.stages.sft_world import World


def comparable(world: Any) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "timings"} for row in world.rows()]


def interrupted(monkeypatch: pytest.MonkeyPatch, method: str, call: int) -> list[float]:
    """The `call`-th time that the learner does this, it takes a minute, and somebody asks for a stop meanwhile."""
    whole, calls, asked = getattr(Learner, method), [0], []

    def slow(self: Learner, *arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            threading.Timer(0.2, lambda: (asked.append(time.monotonic()), os.kill(os.getpid(), signal.SIGTERM))).start()
            for _ in range(600):
                time.sleep(0.1)
        return whole(self, *arguments, **options)

    monkeypatch.setattr(Learner, method, slow)
    return asked


SFT = {"steps": 5, "validation": {"share": 0.2, "every": 2}, "checkpoint": {"every": 0}}


@pytest.mark.parametrize("call", [1, 2, 3], ids=["first", "second", "last"])
def test_a_stop_in_a_validation_is_quick_and_loses_nothing(
    call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("straight", "stopped"):
        (tmp_path / name).mkdir()
    straight, stopped = World(tmp_path / "straight"), World(tmp_path / "stopped")
    assert straight.train(straight.recipe(SFT)) == 0
    with monkeypatch.context() as patch:
        asked = interrupted(patch, "evaluate", call)
        assert stopped.train(stopped.recipe(SFT)) == 0
    assert time.monotonic() - asked[0] < 10
    assert stopped.said()[-1] == "sft: stopped after saving; the same command resumes from here"
    assert stopped.rows()[-1]["step"] < [2, 4, 5][call - 1] and not stopped.final().exists()
    assert stopped.train(stopped.recipe(SFT)) == 0
    assert comparable(stopped) == comparable(straight) and stopped.weights() == straight.weights()
    best = "stages/sft/checkpoints/best.json"
    assert (stopped.run / best).read_bytes() == (straight.run / best).read_bytes()


def test_a_stop_in_the_evaluation_that_was_owed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("straight", "stopped"):
        (tmp_path / name).mkdir()
    straight, stopped = World(tmp_path / "straight"), World(tmp_path / "stopped")
    assert straight.train(straight.recipe(SFT)) == 0
    for _ in range(2):
        with monkeypatch.context() as patch:
            interrupted(patch, "evaluate", 1)
            assert stopped.train(stopped.recipe(SFT)) == 0
    assert stopped.train(stopped.recipe(SFT)) == 0
    assert comparable(stopped) == comparable(straight) and stopped.weights() == straight.weights()


def benchmark_stage(folder: Path, at_start: bool) -> dict[str, Any]:
    rows = folder / "asked.jsonl"
    rows.write_text("".join(f'{{"question": "eva has {i} pens ?", "answer": "{i}"}}\n' for i in range(6)))
    evaluation = {"benchmarks": [str(rows)], "every": 2, "max_tokens": 4, "at_start": at_start}
    changes = {"steps": 3, "eval": evaluation, "batch": {"problems": 2, "token_budget": 256}}
    return toy.reinforcement(folder, {"name": "grpo", "group_size": 2}, **changes)


@pytest.mark.parametrize("at_start", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_stop_among_the_samples_of_a_benchmark(at_start: bool, tmp_path: Path) -> None:
    def run(name: str, stop_at: int | None) -> toy.Toy:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        world, seen = toy.Toy(folder), [0]

        def hear(event: Event) -> None:
            world.events.append(event)
            if isinstance(event, Progressed) and event.what != "toy":
                seen[0] += 1
                if seen[0] == stop_at:
                    os.kill(os.getpid(), signal.SIGTERM)

        assert train(world.recipe(benchmark_stage(folder, at_start)), sink=hear) == 0
        return world

    straight = run("straight", None)
    stopped = run("stopped", 1)
    assert [(row["step"], row["axis"]) for row in stopped.rows()] == ([] if at_start else [(1, "train")])
    stopped = run("stopped", None)
    assert stopped.rows() == straight.rows()
    weights = [(world.final / "model.safetensors").read_bytes() for world in (straight, stopped)]
    assert weights[0] == weights[1]


def test_a_stop_while_the_reference_is_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "PART", 10)
    world = PreferenceWorld(tmp_path)
    with monkeypatch.context() as patch:
        asked = interrupted(patch, "score", 3)
        assert world.train("dpo") == []
    assert time.monotonic() - asked[0] < 10
    assert len(list(tmp_path.rglob("*.part-*"))) == 2, "what was scored is kept"
    calls: list[int] = []
    whole = Learner.score

    def count(self: Learner, *arguments: Any, **options: Any) -> Any:
        calls.append(1)
        return whole(self, *arguments, **options)

    monkeypatch.setattr(Learner, "score", count)
    resumed = world.train("dpo")
    rest = len(calls)
    assert not list(tmp_path.rglob("*.part-*"))
    for kept in list(tmp_path.rglob("reference")):
        shutil.rmtree(kept)
    assert world.train("dpo", run="straight") == resumed
    assert len(calls) - rest == rest + 2, "only what was missing was scored again"
