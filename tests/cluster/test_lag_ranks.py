"""Sampling ahead on several ranks, beside the learner: samples, metrics and weights of one process, also resumed."""

from __future__ import annotations

import ast
import json
import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lemma.engines.remote.server_guard import KEY_VARIABLE
from tests.cluster.crew import Crew
from tests.cluster.generation_servers import KEY, forked_servers
from tests.cluster.test_rl_ranks import recipe_of, samples
from tests.cluster.test_run_ranks import outcome, trained

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


def sampled_by(content: dict[str, Any], fault: str = "") -> tuple[set[str], str]:
    """The threads that sampled steps on this rank, and what went wrong."""
    from lemma.core import faults
    from lemma.rollouts import RolloutCollector, World

    threads, at_work = set(), set()
    step, close = RolloutCollector.step, World.close

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
    os.environ |= {"LEMMA_FAULT": fault, KEY_VARIABLE: KEY}
    try:
        trained(content)
    except OSError as error:
        assert fault
        return threads, str(error)
    finally:
        RolloutCollector.step, World.close = step, close  # type: ignore[method-assign]
        os.environ["LEMMA_FAULT"] = ""
    return threads, ""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The addresses of two generation servers. Responses that fly are held there once nothing is left of the step that
    is learnt from next: so the new weights find them in the middle, however fast the servers are."""
    with forked_servers(tmp_path_factory.mktemp("servers"), 2, holds=True) as both:
        yield [one.url for one in both]


def served(stage: dict[str, Any], urls: list[str], **rollout: Any) -> dict[str, Any]:
    engine = {"engine": {"name": "native", "servers": urls}} if urls else {}
    return stage | {"rollout": stage["rollout"] | rollout | engine}


@pytest.mark.parametrize("name", ["dapo", "game"])
def test_steps_are_sampled_beside_the_learner(crew: Crew, pair: list[str], tmp_path: Path, name: str) -> None:
    crew.run(1, sampled_by, recipe_of(tmp_path, "alone", STAGES[name], slots=2))
    content = recipe_of(tmp_path, "beside", served(STAGES[name], pair), slots=2)
    broken = crew.run(2, sampled_by, content, f"rl.before_update:{3 if name == 'dapo' else 1}:EIO")
    assert all("Input/output" in said for _, said in broken)
    first, second = crew.run(2, sampled_by, content)
    assert first[0] == second[0] == {"MainThread", "sampling ahead"}
    assert outcome(tmp_path / "beside") == outcome(tmp_path / "alone")
    assert samples(tmp_path / "beside") == samples(tmp_path / "alone")


@pytest.mark.parametrize(("name", "servers"), [("dapo", 0), ("game", 1), ("validated", 2)])
def test_responses_fly_on_two_ranks(crew: Crew, pair: list[str], tmp_path: Path, name: str, servers: int) -> None:
    """Interrupted on both in the middle: whole groups all the same, and no draw in two steps."""
    flying = {"max_tokens": 24, "stop": ["p"], "lag": "flying", "lag_limit": 1 if servers else 2}
    content = recipe_of(tmp_path, "run", served(STAGES[name], pair[:servers], **flying), slots=2)
    broken = crew.run(2, sampled_by, content, "rl.before_update:3:EIO")
    assert all("Input/output" in said for _, said in broken)
    before = samples(tmp_path / "run")
    crew.run(2, sampled_by, content)
    found = samples(tmp_path / "run")
    assert set(before) < set(found), "what was sampled is not sampled again"
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    if name != "game":  # where every turn may be over
        assert max(row.get("staleness/mixed", 0) for row in rows) > 0, "some went on across an update"
    assert max(row.get("staleness/max", 0) for row in rows) <= flying["lag_limit"]
    attempts = Counter((ast.literal_eval(key)[2], number) for key, number, *_ in found)
    draws = Counter(draw for draw, _ in attempts)
    assert set(attempts.values()) == {1} and set(draws.values()) == {2}
