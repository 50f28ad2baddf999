"""No environment: one response per problem."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lemma.core.types import Problem
from lemma.environments.environment import EnvironmentOptions


class SingleTurn(EnvironmentOptions):
    """One response, scored by the stage's rewards."""

    name: Literal["single_turn"] = "single_turn"
    """A single response."""
    turns: int = Field(1, ge=1, le=1)
    """Always 1."""

    @property
    def is_single_turn(self) -> bool:
        return True

    def opened(self, problem: Problem, seed: int) -> Problem:
        return problem
