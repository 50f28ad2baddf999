"""What an environment sees of an evaluation when it adds measures of its own."""

from __future__ import annotations

from dataclasses import dataclass

from lemma.core.types import Problem


@dataclass(frozen=True, slots=True)
class Attempt:
    """One episode that was played to measure a model. None is unknown, never a failure."""

    problem: Problem
    sample: int
    turns: int
    success: bool | None
    reward: float | None = None
