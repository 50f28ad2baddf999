"""`rollout.lag`: step t is sampled by version max(0, t - 1 - lag), whether a run was interrupted or not."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lemma.algorithms import ALGORITHMS
from lemma.core import faults
from lemma.rollouts import ProblemOrder, Rollouts, read_episodes
from lemma.runs.run import train
from lemma.stages.reinforcement.rl_options import ReinforcementOptions
from lemma.stages.reinforcement.rl_parts import corrected
from lemma.stages.reinforcement.staleness_queue import StalenessQueue
from tests.algorithms import toy
from tests.stages.test_rl_stage import SMALL, small_stage

STEPS = 6


def stage(folder: Path, lag: int, algorithm: dict[str, Any] | str = "grpo", **rollout: Any) -> dict[str, Any]:
    rollout = {"max_tokens": 6, "lag": lag, **rollout}
    changes: dict[str, Any] = {"steps": STEPS, "rollout": rollout, "checkpoint": {"every": 2}, "optim": {"lr": 0.01}}
    return small_stage(folder, algorithm, **changes)


def versions(world: toy.Toy, step: int) -> set[int]:
    folder = world.run / "stages" / "toy" / "journal"
    (path,) = folder.glob(f"step-{step:06d}.jsonl*")
    return {version for one in read_episodes(path) for turn in one.turns for _, version in turn.versions}


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_the_version_that_samples(lag: int, tmp_path: Path) -> None:
    world = toy.Toy(tmp_path)
    rows = world.train(stage(tmp_path, lag), **SMALL)
    expected = [max(0, step - 1 - lag) for step in range(1, STEPS + 1)]
    assert [versions(world, step) for step in range(1, STEPS + 1)] == [{version} for version in expected]
    ages = [step - version for step, version in enumerate(expected)]
    if lag:
        assert [row["staleness/max"] for row in rows] == [row["staleness/mean"] for row in rows] == ages
        assert all(0 < row["effective_samples"] <= 1 + 1e-6 for row in rows if row["updates"])
        assert any(row["effective_samples"] < 0.999 for row in rows[1:] if row["updates"])
    else:
        assert not any(name.startswith("staleness") for row in rows for name in row)
    assert all(row["mismatch/max"] < 1e-4 for row in rows[:1] if row["updates"]), "the first step is never stale"


@pytest.mark.parametrize("where", ["rollouts.before_finish:5", "rl.before_update:4", "rl.mid_update:3"])
def test_a_run_that_was_interrupted_ends_with_the_same_weights(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[str, torch.Tensor]
) -> None:
    world = toy.Toy(tmp_path)
    recipe = world.recipe(stage(tmp_path, 2, {"name": "dapo", "group_size": 4}), **SMALL)
    monkeypatch.setattr(faults, "_visits", type(faults._visits)())
    monkeypatch.setenv("LEMMA_FAULT", f"{where}:EIO")
    with pytest.raises(OSError):
        train(recipe, sink=world.events.append)
    monkeypatch.delenv("LEMMA_FAULT")
    assert train(recipe, sink=world.events.append) == 0
    found = load_file(world.final / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of a run that nothing interrupted. Groups that are replaced make the number of draws uneven."""
    folder = tmp_path_factory.mktemp("whole")
    world = toy.Toy(folder)
    world.train(stage(folder, 2, {"name": "dapo", "group_size": 4}), **SMALL)
    return load_file(world.final / "model.safetensors")


def test_samples_of_older_versions_are_weighed() -> None:
    def cap(algorithm: Any, **rollout: Any) -> float | None:
        options = ReinforcementOptions(algorithm=algorithm, rollout=rollout)
        return getattr(corrected(options), "mismatch_cap", None)

    for name in set(ALGORITHMS) - {"expert_iteration"}:
        assert cap({"name": name}) is None
        assert cap({"name": name}, lag=1) == 2.0, name
    assert cap({"name": "grpo", "mismatch_cap": 3}, lag=1) == 3
    assert cap({"name": "grpo"}, lag=1, lag_cap=None) is None
    assert cap({"name": "grpo"}, lag=1, lag_cap=1.5) == 1.5
    assert cap({"name": "expert_iteration"}, lag=1) is None


def test_sampling_goes_on_while_the_learner_works() -> None:
    """With an engine of its own device: the next step is being sampled when this one is handed out."""
    order = ProblemOrder([], 0, "x")
    ahead = StalenessQueue(order, 1, 3)
    may_go_on = threading.Event()
    began: list[int] = []
    threads: set[int] = set()

    def sample(step: int) -> Rollouts:
        began.append(step)
        threads.add(threading.get_ident())
        order.drawn += 10 * step
        if step > 1:
            assert may_go_on.wait(30)
        return Rollouts(wanted=step, grade_seconds=step)

    ahead.sample_by(sample, is_beside=True)
    first = ahead.take(1)
    assert first.wanted == first.grade_seconds == 1
    while began != [1, 2]:
        pass
    assert ahead.state()[1] == {"drawn": 10}, "a checkpoint of step 1 begins with the draws of step 2"
    may_go_on.set()
    ahead.wait()
    second, third = ahead.take(2), ahead.take(3)
    assert (second.wanted, third.wanted) == (2, 3)
    assert second.grade_seconds == third.grade_seconds == 0, "nobody waited for their grading"
    ahead.wait()
    assert began == [1, 2, 3] and ahead.state()[1] == {"drawn": 60}
    assert len(threads) == 2, "a worker that is started in one step is there in the next: its thread lives on"
    ahead.close()


def test_no_step_is_passed_over_where_the_sampling_thread_is_slow_to_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(threading.Thread):
        def run(self) -> None:
            time.sleep(0.05)
            super().run()

    monkeypatch.setattr(threading, "Thread", Slow)
    ahead = StalenessQueue(ProblemOrder([], 0, "x"), 3, 5)
    ahead.sample_by(lambda step: Rollouts(wanted=step), is_beside=True)
    assert [ahead.take(step).wanted for step in range(1, 6)] == [1, 2, 3, 4, 5]


def test_what_fails_ahead_is_raised_where_it_is_waited_for() -> None:
    ahead = StalenessQueue(ProblemOrder([], 0, "x"), 1, 3)

    def sample(step: int) -> Rollouts:
        if step == 2:
            raise OSError("no engine")
        return Rollouts()

    ahead.sample_by(sample, is_beside=True)
    ahead.take(1)
    with pytest.raises(OSError, match="no engine"):
        ahead.wait()
