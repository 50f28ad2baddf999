"""How answers are extracted and compared. The defaults are exact; a benchmark may ask for something looser."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lemma.config import Options

Method = Literal["tag", "box", "hash", "phrase", "conclusion"]

ORDER: tuple[Method, ...] = ("tag", "box", "hash", "phrase", "conclusion")


# Hashable, because verdicts are cached by (gold, answer, rules).
class Rules(Options):
    """What counts as an answer, and when two answers are equal."""

    order: tuple[Method, ...] = ORDER
    """Where to look for the final answer, in this order. A box or a tag that is found ends the search."""
    tags: tuple[str, ...] = ("answer", "SOLUTION", "solution")
    """Names of tags that hold an answer, as in <answer>...</answer>."""
    thinking: Literal["after", "whole"] = "after"
    """after: an answer inside a thinking part does not count; whole: the whole text is searched."""
    relative: float = Field(0.0, ge=0)
    """Relative tolerance for numbers; 0 means exact. Only for benchmarks that ask for it."""
    absolute: float = Field(0.0, ge=0)
    """Absolute tolerance for numbers; 0 means exact."""
    rounded: bool = True
    """Whether a decimal with ten or more places equals the fraction that it writes out: 0.3333333333 for 1/3."""
    ordered: bool = False
    """Whether the order of a bare list matters: 1, 2 against 2, 1. Tuples are always ordered, sets never."""
    percent: Literal["either", "strict"] = "either"
    """either: 25% equals 0.25 and also 25; strict: 25% equals 0.25 only."""
    case: bool = False
    """Whether words are case-sensitive."""
    symbolic: bool = True
    """Whether to ask sympy, in a worker process, when the exact comparison cannot decide."""

    @property
    def tolerant(self) -> bool:
        return self.relative > 0 or self.absolute > 0


DEFAULT = Rules()
