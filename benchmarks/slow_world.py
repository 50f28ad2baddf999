"""An environment whose tools only take time, for benchmarks/environments.py."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from lemma.core.random import stream
from lemma.core.types import Message, Outcome, Problem
from lemma.environments import Action, Environment, Observation


class Slow(Environment):
    """Answers after half to one and a half times `seconds`, drawn anew for each turn; ends after `turns`."""

    step_seconds = 120.0

    def __init__(self, seconds: float, turns: int):
        self.seconds, self.turns, self.count, self.name = seconds, turns, 0, ""

    def reset(self, problem: Problem, seed: int) -> Sequence[Message]:
        self.name = problem.id
        return []

    async def step(self, said: Action) -> Any:  # type: ignore[override]
        self.count += 1
        chance = float(stream(0, "slow", self.name, self.count).random())
        await asyncio.sleep(self.seconds * (0.5 + chance))
        return Observation(f"{self.name} {self.count}", done=self.count == self.turns)

    def score(self) -> Outcome:
        return Outcome(float(self.count), True)
