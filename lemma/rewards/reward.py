"""What a reward is: a function from one completion and what is known about it to a number, or None: not applicable."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from lemma.config import Options
from lemma.core.types import Finish, Outcome, Problem
from lemma.formats import Format, Parsed
from lemma.grading import DEFAULT, GradingService, Rules, Verdict, default_service
from lemma.grading.quick import decides_nothing

if TYPE_CHECKING:
    from concurrent.futures import Future


@dataclass(slots=True)
class RewardInput:
    """One completion to be scored. The grading service computes `verdict` once, when it is first read.

    `parsed` is what the format found; without it the grader looks for the answer itself. A completion whose format
    yields no answer is wrong: no number elsewhere in the text is taken instead.
    """

    completion: str
    problem: Problem
    parsed: Parsed | None = None
    ids: Sequence[int] = ()
    finish: Finish = "stop"
    service: GradingService | None = None
    rules: Rules = DEFAULT
    format: Format | None = None
    """The format of the completion; rewards that look for tags use its tags."""
    earlier: Sequence[Sequence[int]] = ()
    """The ids of an episode's turns before the last one, which `completion` and `ids` are of."""
    outcome: Outcome | None = None
    """The environment's outcome of the whole episode, if there was one; it replaces the grader's verdict."""
    _asked: list[Future[Verdict]] = field(default_factory=list, repr=False)
    _verdict: Verdict | None = field(default=None, repr=False)
    looked: bool = field(default=False, repr=False)
    """Whether the verdict has been read."""

    @property
    def length(self) -> int:
        """How many tokens were said, over all turns."""
        return sum(map(len, self.earlier)) + len(self.ids)

    def ask(self) -> None:
        """Begin grading without waiting for the verdict."""
        if self._verdict is not None or self._asked:
            return
        if self.outcome is not None:
            self._verdict = verdict_of(self.outcome)
        elif not self.problem.golds:
            self._verdict = Verdict("unknown", "no_gold")
        elif self.parsed is not None and self.parsed.answer is None:
            is_open = all(map(decides_nothing, self.problem.golds))
            self._verdict = Verdict("unknown", "gold_unreadable") if is_open else Verdict("wrong", "no_answer")
        else:
            text = self.completion if self.parsed is None else self.parsed.answer or ""
            service = self.service or default_service()
            self._asked = [service.submit(text, gold, self.rules) for gold in self.problem.golds]

    @property
    def is_waiting(self) -> bool:
        """Whether a verdict was requested and has not arrived yet."""
        return not all(asked.done() for asked in self._asked)

    @property
    def verdict(self) -> Verdict:
        """The grader's verdict: right if any gold answer matches, unknown only if no gold answer could decide."""
        self.looked = True
        if self._verdict is None:
            self.ask()
            if self._verdict is None:
                order = {"right": 0, "wrong": 1, "unknown": 2}
                self._verdict = min((asked.result() for asked in self._asked), key=lambda verdict: order[verdict.kind])
        return self._verdict


def verdict_of(outcome: Outcome) -> Verdict:
    """An environment's outcome as a verdict; unknown if it does not know."""
    if outcome.success is None:
        return Verdict("unknown", outcome.reason or "environment")
    return Verdict("right" if outcome.success else "wrong", outcome.reason or "environment")


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

    @property
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

    @property
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
