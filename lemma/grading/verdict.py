"""What a grader says about an answer: right, wrong or unknown, and why."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

Kind = Literal["right", "wrong", "unknown"]

REASONS = {
    "exact": "the answer and the gold are the same text after normalisation",
    "number": "both are numbers, compared exactly",
    "expression": "both are expressions, compared by value",
    "structure": "lists, tuples, sets, intervals, matrices or relations, compared part by part",
    "text": "words, compared as words",
    "choice": "the letter of an option",
    "symbolic": "compared by sympy in a worker process",
    "no_answer": "no answer was found in the completion",
    "unreadable": "the answer cannot be read as mathematics, and its words differ from the gold",
    "limit": "the answer exceeds a limit of length, digits, nesting, exponent, time or memory",
    "no_gold": "there is no gold answer",
    "gold_unreadable": "the gold cannot be read as mathematics and is not words",
    "gold_limit": "the gold exceeds a limit",
    "grader": "no worker could be started, workers were lost from outside, or the comparison failed",
}


class Verdict(NamedTuple):
    """The outcome of one comparison. `seconds` is the time it took and the only part that may vary between runs."""

    kind: Kind
    reason: str
    extracted: str | None = None
    seconds: float = 0.0

    @property
    def right(self) -> bool:
        return self.kind == "right"

    @property
    def known(self) -> bool:
        """Whether the verdict may become a reward; an unknown verdict never does."""
        return self.kind != "unknown"


_ORDER: dict[Kind, int] = {"right": 0, "wrong": 1, "unknown": 2}


def best_of(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict where any of several golds counts: right, else wrong, else unknown; it took as long as all."""
    several = list(verdicts)
    if not several:
        return Verdict("unknown", "no_gold")
    first = min(several, key=lambda verdict: _ORDER[verdict.kind])
    return first._replace(seconds=sum(verdict.seconds for verdict in several))
