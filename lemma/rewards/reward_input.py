"""One completion that is to be scored, with what is known about it, and the verdict of the grader on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lemma.core.types import Finish, Outcome, Problem
from lemma.formats import Format, Parsed
from lemma.grading import DEFAULT, GradingService, Rules, Verdict, default_service
from lemma.grading.quick import decides_nothing, quick

if TYPE_CHECKING:
    from concurrent.futures import Future


# Of several golds, any counts.
ORDER = ("right", "wrong", "unknown")


@dataclass(slots=True)
class RewardInput:
    """One completion to be scored. Its `verdict` is asked for once: most are found at once, the others by the grading
    service.

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
    _asked: list[Verdict | Future[Verdict]] = field(default_factory=list, repr=False)
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
            found = [quick(text, gold, self.rules) for gold in self.problem.golds]
            known = [one for one in found if isinstance(one, Verdict)]
            if len(known) == len(found):
                self._verdict = min(known, key=lambda one: ORDER.index(one.kind))
            else:
                service = self.service or default_service()
                self._asked = [one if isinstance(one, Verdict) else service.decide(one) for one in found]

    @property
    def is_waiting(self) -> bool:
        """Whether a verdict was requested and has not arrived yet."""
        return not all(isinstance(asked, Verdict) or asked.done() for asked in self._asked)

    @property
    def verdict(self) -> Verdict:
        """The grader's verdict: right if any gold answer matches, unknown only if no gold answer could decide."""
        self.looked = True
        if self._verdict is None:
            self.ask()
        if self._verdict is None:
            found = (asked if isinstance(asked, Verdict) else asked.result() for asked in self._asked)
            self._verdict = min(found, key=lambda one: ORDER.index(one.kind))
        return self._verdict


def verdict_of(outcome: Outcome) -> Verdict:
    """An environment's outcome as a verdict; unknown if it does not know."""
    if outcome.success is None:
        return Verdict("unknown", outcome.reason or "environment")
    return Verdict("right" if outcome.success else "wrong", outcome.reason or "environment")
