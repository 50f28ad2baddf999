"""The order in which problems are drawn: a function of the seed and of how many were drawn before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lemma.core.random import permutation
from lemma.core.types import Problem


@dataclass(frozen=True)
class Task:
    """A problem as an engine gets it; `trace` are the ids of a teacher's whole response, end included, if any.

    `turns` are those of a trace that takes several, each with its end.
    """

    problem: Problem
    prompt: np.ndarray
    trace: np.ndarray | None = None
    turns: tuple[np.ndarray, ...] = ()

    @property
    def longest_turn(self) -> int:
        """Tokens of the trace that must fit into one turn; the end of a turn in an episode may be left off."""
        if self.turns:
            return max(len(turn) - 1 for turn in self.turns)
        return 0 if self.trace is None else len(self.trace)


@dataclass
class ProblemOrder:
    """Hands out tasks, a new order for every pass over them. `drawn` is all there is to save."""

    tasks: Sequence[Task]
    seed: int
    name: str
    drawn: int = 0
    _order: tuple[int, list[int]] = field(default=(-1, []), repr=False)

    def draw(self, count: int) -> list[tuple[int, Task]]:
        """The next tasks, each with the number of its draw."""
        first, self.drawn = self.drawn, self.drawn + count
        return [(number, self.at(number)) for number in range(first, first + count)]

    def at(self, number: int) -> Task:
        """The task of a draw."""
        epoch, place = divmod(number, len(self.tasks))
        if self._order[0] != epoch:
            self._order = (epoch, permutation(len(self.tasks), self.seed, self.name, "problems", epoch).tolist())
        return self.tasks[self._order[1][place]]

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {}, {"drawn": self.drawn}

    def load(self, tensors: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
        self.drawn = int(extra["drawn"])
