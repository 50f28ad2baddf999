"""Sampling ahead on several ranks, beside the learner: samples, metrics and weights of one process, also resumed."""

from __future__ import annotations

import ast
import json
import os
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.crew import Crew
from tests.cluster.test_rl_ranks import recipe_of, samples
from tests.cluster.test_run_ranks import outcome
from tests.cluster.test_speakers import trained_or_spoken

LAG = {"steps": 4, "checkpoint": {"every": 2}, "rollout": {"max_tokens": 4, "lag": 2}}
STAGES: dict[str, dict[str, Any]] = {
    "dapo": LAG | {"algorithm": {"name": "dapo", "group_size": 2}},  # groups of two are often dead and replaced
    "game": LAG | {
        "algorithm": {"name": "grpo", "group_size": 2}, "environment": {"name": "higher_lower", "turns": 2},
        "data": {"source": "higher_lower", "guessing": {"numbers": 8, "count": 8}}, "batch": {"problems": 4},
    },
    "validated": LAG | {
        "algorithm": {"name": "grpo", "group_size": 2}, "validation": {"share": 0.25, "every": 2},
    },
}  # fmt: skip


def sampled_by(content: dict[str, Any], learners: int, speakers: int, fault: str = "") -> tuple[set[str], str]:
    """The threads that sampled steps on this rank, and what went wrong."""
    from lemma.cluster.speaker import Speaker
    from lemma.core import faults
    from lemma.rollouts import RolloutCollector, World

    threads, at_work = set(), set()
    step, look_up, close = RolloutCollector.step, Speaker._look_up, World.close
    Speaker._look_up = _waits_for_weights(look_up)  # type: ignore[method-assign]

    def noted(collector: RolloutCollector, *numbers: int) -> Any:
        threads.add(threading.current_thread().name)
        at_work.add(numbers)
        try:
            return step(collector, *numbers)
        finally:
            at_work.remove(numbers)

    def closed(world: World) -> None:
        assert not at_work, "nobody plays in a world that is closed"
        close(world)

    RolloutCollector.step, World.close = noted, closed  # type: ignore[method-assign]
    faults._visits.clear()
    os.environ["LEMMA_FAULT"] = fault
    try:
        trained_or_spoken(content, learners, speakers)
    except (OSError, AssertionError) as error:  # the speakers lose those who learn
        assert fault
        return threads, str(error)
    finally:
        RolloutCollector.step, Speaker._look_up, World.close = step, look_up, close  # type: ignore[method-assign]
        os.environ["LEMMA_FAULT"] = ""
    return threads, ""


def _waits_for_weights(look_up: Any) -> Any:
    """A speaker whose responses fly holds them once it has nothing left of the step that is learnt from next. So the
    new weights find them in the middle, however fast it is."""

    def held(speaker: Any, sessions: Any, engine: Any) -> None:
        look_up(speaker, sessions, engine)
        while any(one.is_partial for one in sessions) and not any(one.is_ended for one in sessions):
            steps = {key[1] for one in sessions for key in one.keys}
            if not steps or min(steps) <= engine.version + 1:
                return
            time.sleep(0.01)
            look_up(speaker, sessions, engine)

    return held


@pytest.mark.parametrize("name", ["dapo", "game"])
def test_steps_are_sampled_beside_the_learner(crew: Crew, tmp_path: Path, name: str) -> None:
    crew.run(4, sampled_by, recipe_of(tmp_path, "alone", STAGES[name], slots=2), 1, 0)
    content = recipe_of(tmp_path, "beside", STAGES[name], slots=2)
    broken = crew.run(4, sampled_by, content, 2, 2, f"rl.before_update:{3 if name == 'dapo' else 1}:EIO")
    assert all("Input/output" in said for _, said in broken[:2])
    first, second, *_ = crew.run(4, sampled_by, content, 2, 2)
    assert first[0] == second[0] == {"MainThread", "sampling ahead"}
    assert outcome(tmp_path / "beside") == outcome(tmp_path / "alone")
    assert samples(tmp_path / "beside") == samples(tmp_path / "alone")


@pytest.mark.parametrize(("name", "speakers"), [("dapo", 0), ("game", 1), ("validated", 2)])
def test_responses_fly_on_two_ranks(crew: Crew, tmp_path: Path, name: str, speakers: int) -> None:
    """Interrupted on both in the middle: whole groups all the same, and no draw in two steps."""
    flying = {"max_tokens": 24, "stop": ["p"], "lag": "flying", "lag_limit": 1 if speakers else 2}
    content = recipe_of(tmp_path, "run", STAGES[name] | {"rollout": flying}, slots=2)
    broken = crew.run(4, sampled_by, content, 2, speakers, "rl.before_update:3:EIO")
    assert all("Input/output" in said for _, said in broken[:2])
    before = samples(tmp_path / "run")
    crew.run(4, sampled_by, content, 2, speakers)
    found = samples(tmp_path / "run")
    assert set(before) < set(found), "what was sampled is not sampled again"
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    if name != "game":  # where every turn may be over
        assert max(row.get("staleness/mixed", 0) for row in rows) > 0, "some went on across an update"
    assert max(row.get("staleness/max", 0) for row in rows) <= flying["lag_limit"]
    attempts = Counter((ast.literal_eval(key)[2], number) for key, number, *_ in found)
    draws = Counter(draw for draw, _ in attempts)
    assert set(attempts.values()) == {1} and set(draws.values()) == {2}
