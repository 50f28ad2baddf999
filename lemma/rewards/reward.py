"""What a reward is: a function from one completion and what is known about it to a number, or None: not applicable."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from lemma.config import Options

if TYPE_CHECKING:
    from lemma.rewards.reward_input import RewardInput


class WrongReturn(Exception):
    """A function's return value is not a reward. The text follows the name of the reward; `fix` says how to repair
    it."""

    def __init__(self, problem: str, fix: str):
        super().__init__(problem)
        self.fix = fix


SECONDS_EACH = 300.0
"""Time limit per completion for a class from outside that does not set its own."""


class Reward(Options):
    """A reward and its options. The name picks it in a recipe; the weight multiplies it in the sum."""

    name: str = ""
    """Which reward."""
    weight: float = 1.0
    """Its weight in the sum of rewards."""

    needs_verdict: ClassVar[bool] = False
    """Whether it asks the grader; a completion whose verdict is unknown is then left out altogether."""
    leaves_out: ClassVar[bool] = False
    """Whether its None means that another system's grader cannot decide, which also leaves the completion out."""

    @cached_property
    def label(self) -> str:
        """The name under which its distribution is logged."""
        return self.name.rpartition(":")[2]

    @property
    def place(self) -> tuple[str, int | None] | None:
        """File and line of a function that its user wrote."""
        return None

    @property
    def begins(self) -> int | None:
        """The longest response without a length penalty; None if length is never penalised."""
        return None

    @property
    def needs_gold(self) -> bool:
        """Whether it compares with the gold answer, so that a problem without one gets no reward."""
        return self.needs_verdict or self.leaves_out

    @cached_property
    def is_ours(self) -> bool:
        """Whether it runs only Lemma's own code."""
        return type(self).__module__.startswith("lemma.") and self.place is None

    @property
    def may_use_device(self) -> bool:
        """Whether scoring may compute on the policy's device: a model does, and user code might."""
        return not self.is_ours

    @property
    def seconds_each(self) -> float | None:
        """Time limit per completion; None for our own code, which always ends."""
        return None if self.is_ours else SECONDS_EACH

    @property
    def files(self) -> list[Path]:
        """Files on this machine that decide the score: a resumed run must find them unchanged."""
        return []

    def check(self) -> None:
        """Refuse, before anything is loaded, a reward that could never score, such as a function that does not
        exist."""

    def score(self, item: RewardInput) -> float | None:
        """The reward of one completion, before its weight; None where it does not apply."""
        raise AssertionError("a reward defines score or score_all")

    @property
    def is_async(self) -> bool:
        """Whether it is scored with `score_async`, all completions of a batch at the same time: where a class from
        outside defines `score` as `async`."""
        return inspect.iscoroutinefunction(self.score) and type(self).score_all is Reward.score_all

    async def score_async(self, item: RewardInput) -> float | None:
        """As `score`, of a reward that is `async`."""
        found: Any = self.score(item)
        return await found

    def score_all(self, items: Sequence[RewardInput]) -> list[float | None]:
        """The rewards of a batch."""
        return [self.score(item) for item in items]
