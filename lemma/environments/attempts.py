"""What an environment sees of an evaluation when it adds its own metrics."""

from __future__ import annotations

from dataclasses import dataclass

from lemma.core.types import Problem


@dataclass(frozen=True, slots=True)
class Attempt:
    """One episode of an evaluation. None is unknown, never a failure."""

    problem: Problem
    sample: int
    turns: int
    success: bool | None
    reward: float | None = None
