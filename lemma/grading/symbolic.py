"""Equality by sympy, through the LaTeX parser and comparison of math-verify. Runs in worker processes only.

Everything here may be slow or need much memory, so `service.py` runs it where it can be killed.
"""

from __future__ import annotations

import re
from functools import lru_cache
from time import perf_counter
from typing import Any

from lemma.grading.grader import PendingGrade, decide, unread
from lemma.grading.guard import Refused, check_symbolic
from lemma.grading.limits import MAX_PRECISION, GoldLimit, LimitExceeded
from lemma.grading.quick import quick
from lemma.grading.rules import DEFAULT, Rules
from lemma.grading.verdict import Verdict


class _Unparsed(Exception):
    """The parser found nothing that it can parse."""


@lru_cache(maxsize=256)
def _parse(text: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    check_symbolic(text)
    text = _BOUNDS.sub(r"_{\1}^{\2}", _as_fractions(_without_imaginary_index(text)))
    parsed = parse(
        "$" + text.replace("$", "") + "$",
        extraction_config=[LatexExtractionConfig()],
        fallback_mode="no_fallback",
        parsing_timeout=None,
    )
    if not parsed:
        raise _Unparsed
    return list(parsed)


_BOUNDS = re.compile(r"(?<=\\int)_(\w)\s*\^(\w)")
_INDEX = re.compile(r"\\(?:sum|prod)_\{\s*i\s*=")


def _without_imaginary_index(text: str) -> str:
    """An index i of a sum would be parsed as the imaginary unit, so it becomes k."""
    if _INDEX.search(text) and not re.search(r"(?<![A-Za-z\\])k(?![A-Za-z])", text):
        return re.sub(r"(?<![A-Za-z\\])i(?![A-Za-z])", "k", text)
    return text


_DECIMAL = re.compile(r"(?<![\d.])(\d+)\.(\d+)(?![\d.])(?!\s*\\overline)")


def _as_fractions(text: str) -> str:
    """Decimals as fractions: sympy's own floating-point numbers are compared after rounding."""
    return _DECIMAL.sub(lambda m: rf"\frac{{{int(m[1] + m[2])}}}{{{10 ** len(m[2])}}}", text)


_EXPONENT = re.compile(r"\^\s*\{?\s*-?\s*(\d{1,5})")


def _precision(gold: str, answer: str) -> int:
    """Digits to which sympy compares values: more than the numbers in the two texts can hide a difference in."""
    digits = 50
    for text in (gold, answer):
        digits += 2 * sum(c.isdigit() for c in text) + 2 * sum(int(n) for n in _EXPONENT.findall(text))
    return min(digits, MAX_PRECISION)


_CAPITAL = re.compile(r"\\(?:mathbb|text|begin|end|operatorname)\s*\{[^{}]*\}|\\[A-Za-z]+|([A-Z])")
_SMALL = re.compile(r"\\[A-Za-z]+|([a-z])")


def _in_small_letters(*texts: str) -> list[str]:
    """The parser knows small letters only, so a capital whose small letter occurs too becomes one that does not."""
    used = {m[1] for text in texts for m in _SMALL.finditer(text) if m[1]}
    clashing = sorted({m[1] for text in texts for m in _CAPITAL.finditer(text) if m[1] and m[1].lower() in used})
    others = dict(zip(clashing, (letter for letter in "qwzvusrpmhgyxtnlkjcba" if letter not in used), strict=False))
    if not others:
        return list(texts)
    return [_CAPITAL.sub(lambda m: others.get(m[1] or "", m[0]), text) for text in texts]


def equal(gold: str, answer: str) -> bool:
    """Whether sympy finds the two equal. Raises GoldLimit or LimitExceeded, depending on whose text it is."""
    from math_verify import verify

    gold, answer = _in_small_letters(gold, answer)
    try:
        left = _parse(gold)
    except LimitExceeded as error:
        raise GoldLimit from error
    except (Refused, _Unparsed):
        return False
    if _APART.search(answer) or _CROSS.search(gold):
        return False
    try:
        right = _parse(answer)
    except (Refused, _Unparsed):
        return False
    try:
        return bool(
            verify(left, right, timeout_seconds=None, float_rounding=12, numeric_precision=_precision(gold, answer))
        )
    except (RecursionError, MemoryError) as error:
        raise LimitExceeded("comparison") from error


# A cross product is no product: the parser would let its factors change places.
_CROSS = re.compile(r"\\(?:vec|mathbf|overrightarrow)\s*\{[^{}]*\}\s*\\times(?![A-Za-z])")
_APART = re.compile(r"(?<![\d^_])\d+\s+\d")


def _is_read(text: str) -> bool:
    try:
        return bool(_parse(text))
    except (LimitExceeded, Refused, _Unparsed):
        return False


def settle(pending: PendingGrade) -> tuple[str, str]:
    """Decide what the exact path left open: (kind, reason)."""
    kind, reason = decide(pending.gold, pending.answer, pending.rules, equal)
    if kind == "wrong" and reason != "limit" and not all(map(_is_read, unread(pending.gold))):
        return "unknown", "gold_unreadable"
    return kind, reason if reason in ("limit", "gold_limit", "choice") else "symbolic"


def grade_here(prediction: str, gold: str, rules: Rules = DEFAULT) -> Verdict:
    """Grade with sympy in this process, without a time limit: for workers and benchmarks."""
    start = perf_counter()
    outcome = quick(prediction, gold, rules)
    if isinstance(outcome, Verdict):
        return outcome
    if not rules.symbolic:
        return Verdict("wrong", "unreadable", outcome.extracted, perf_counter() - start)
    kind, reason = settle(outcome)
    return Verdict(kind, reason, outcome.extracted, perf_counter() - start)  # type: ignore[arg-type]


_WARM = (("x+1", "1+x"), (r"\sum_{k=0}^{n-1} a_k b_{n-k}", r"\sum_{k=0}^{n-1} b_{n-k} a_k"))


def warm_up() -> None:
    """Do once what is slow the first time, so that it does not count against an answer's limit."""
    for gold, answer in _WARM:
        equal(gold, answer)


def difference_is_zero(gold: str, answer: str) -> bool:
    """Whether the difference of two LaTeX formulas simplifies to zero: equality as older graders define it."""
    from sympy import simplify

    try:
        left, right = _parse(gold)[0], _parse(answer)[0]
        return bool(simplify(left - right) == 0)
    except (_Unparsed, TypeError, AttributeError, ValueError):
        return False
