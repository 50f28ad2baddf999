"""The reward of an episode by AppWorld's tests, and the metrics of an evaluation: task and scenario goal completion."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from lemma.core.types import Outcome
from lemma.environments.environment import Attempt

RewardKind = Literal["tests", "success", "compat"]
# What the public PPO system pays for a task that its agent calls complete, whatever the tests say.
COMPLETION = 10.0


@dataclass(frozen=True, slots=True)
class Tests:
    """The results of a task's tests. `free` are those that pass if nothing is done."""

    passed: int
    total: int
    free: int
    success: bool
    completed: bool
    gave_up: bool = False

    @property
    def share(self) -> float:
        """Tests passed, of all."""
        return self.passed / self.total if self.total else 0.0

    @property
    def share_earned(self) -> float:
        """Tests passed beyond those that doing nothing passes, of all beyond those. What is broken costs."""
        earnable = self.total - self.free
        return max(0.0, (self.passed - self.free) / earnable) if earnable else float(self.success)


def outcome(tests: Tests, kind: RewardKind, pay_for_nothing: bool) -> Outcome:
    """The reward and the success of an episode, and a few words about it."""
    ending = "gave up" if tests.gave_up else "completed" if tests.completed else "not completed"
    reason = f"{tests.passed} of {tests.total} tests passed; {ending}"
    if kind == "compat":
        reward = COMPLETION if tests.completed else 0.0
    elif tests.success:
        reward = 1.0
    elif kind == "success" or not tests.completed:
        reward = 0.0
    else:
        reward = tests.share if pay_for_nothing else tests.share_earned
    return Outcome(reward, tests.success, reason)


def goal_completion(attempts: Sequence[Attempt]) -> dict[str, list[float]]:
    """TGC: each task, 1 where it was a success. SGC: each scenario, 1 where all its tasks were. By difficulty as well.

    With several samples of a task there is a scenario for each sample. What is unknown counts nowhere.
    """
    measures: dict[str, list[float]] = {}
    levels = sorted({one.problem.level for one in attempts if one.problem.level is not None})
    for level in (None, *levels):
        chosen = [one for one in attempts if level is None or one.problem.level == level]
        suffix = "" if level is None else f"/difficulty_{level}"
        scenarios: dict[tuple[str, int], list[bool | None]] = defaultdict(list)
        for one in chosen:
            scenarios[(one.problem.id.partition("_")[0], one.sample)].append(one.success)
        # One failure settles a scenario, whatever the others were.
        settled = [every for every in scenarios.values() if False in every or None not in every]
        measures[f"tgc{suffix}"] = [float(one.success) for one in chosen if one.success is not None]
        measures[f"sgc{suffix}"] = [float(False not in every) for every in settled]
    return measures


def tests_of(verdict: Mapping[str, Any]) -> Tests:
    """The test results in the judge's answer."""
    return Tests(**{field.name: verdict[field.name] for field in fields(Tests)})
