"""How many digits a comparison needs, so that no two different values that fit the limits look equal.

The height of a tree bounds how far its numbers can raise or lower its value, in decimal digits. Two different values of
heights g and a differ by about 10^-(g+a) or more, so they are computed to twice that plus fifty digits. If that is too
much work, the text that needs it exceeds a limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from functools import lru_cache
from typing import Any

from lemma.grading import evaluate
from lemma.grading.evaluate import DIGITS, Undefined
from lemma.grading.expression import Tree
from lemma.grading.limits import MAX_PRECISION, MAX_WORK, GoldLimit, LimitExceeded

_MARGIN = 10


def _parts(tree: Tree) -> list[Tree]:
    return [part for part in tree[1:] if isinstance(part, tuple)]


def _size(tree: Tree) -> float:
    """How large the value of an exponent or an argument is."""
    try:
        value = abs(evaluate.numeric(tree, 0))
    except Undefined:
        return 1.0
    return 1.0 if evaluate._context().isinf(value) else float(value)


@lru_cache(maxsize=4096)
def height(tree: Tree) -> float:
    """Decimal digits by which the numbers of the tree can raise or lower its value."""
    name = tree[0]
    if name == "num":
        return math.log10(max(1, abs(tree[1].numerator))) + math.log10(tree[1].denominator)
    if name in ("sym", "const"):
        return 1.0
    below = sum(height(part) for part in _parts(tree))
    if name == "pow":
        return below + height(tree[1]) * max(1.0, _size(tree[2]))
    if name == "fun" and tree[1] in ("exp", "sinh", "cosh"):
        return below + _size(tree[2])
    if name in ("fact", "binom"):
        top = _size(tree[1])
        return below + top * math.log10(top + 2)
    return below + 1.0


def _is_whole(tree: Tree) -> bool:
    tree = tree[1] if tree[0] == "neg" else tree
    return bool(tree[0] == "num" and tree[1].denominator == 1)


@lru_cache(maxsize=4096)
def _cost(tree: Tree) -> int:
    """Cost of the operations that are slow at high precision; functions count more than roots."""
    parts = _parts(tree)
    own = {"root": 1, "const": 1, "fun": 20}.get(tree[0], 0)
    if tree[0] == "pow":
        own = 1 if _is_whole(parts[1]) else 20
    elif tree[0] in ("fact", "binom"):
        own = 1 if all(map(_is_whole, parts)) else 300
    return own + sum(_cost(part) for part in parts)


def weigh(tree: Tree) -> tuple[float, int]:
    """The height of a tree, and the cost of its operations that are slow at high precision."""
    return height(tree), _cost(tree)


def _digits(tall: float, cost: int) -> int:
    digits = DIGITS + 2 * math.ceil(tall)
    if digits > MAX_PRECISION or digits * cost > MAX_WORK:
        raise LimitExceeded("precision")
    return digits


@contextmanager
def digits_for(tall: float, cost: int) -> Iterator[Callable[[Any, Any], bool]]:
    """Context in which numbers have the precision that this height needs; yields a comparison of two of them."""
    digits = _digits(tall, cost)
    context = evaluate._context()
    with context.workdps(digits):
        smallest = context.mpf(10) ** -(DIGITS - _MARGIN + math.ceil(tall))

        def close(left: Any, right: Any) -> bool:
            if context.isinf(left) or context.isinf(right):
                return bool(left == right)
            return bool(abs(left - right) <= smallest * max(1, abs(left), abs(right)))

        yield close


@contextmanager
def enough_digits(gold: Tree, answer: Tree, factors: int = 1) -> Iterator[Callable[[Any, Any], bool]]:
    """Like `digits_for`, for values of these two trees, or products of this many of them."""
    try:
        tall, cost = weigh(gold)
        _digits(2 * factors * tall, 2 * cost)
    except LimitExceeded as error:
        raise GoldLimit from error
    more, costs = weigh(answer)
    with digits_for(factors * (tall + more), cost + costs) as close:
        yield close


MANY_PLACES = 10
_MOST_PLACES = 60


def places(value: Fraction) -> int | None:
    """How many places the decimal expansion has; None if it does not end, or ends too late to matter."""
    if value.denominator.bit_length() > 4 * _MOST_PLACES:
        return None
    power = 1
    for count in range(_MOST_PLACES + 1):
        if power % value.denominator == 0:
            return count
        power *= 10
    return None


def stands_for(left: Fraction, right: Fraction) -> bool:
    """Whether one is a fraction without a finite decimal and the other writes out its first ten places or more.

    If 2q² < 10^k, p/q is the only fraction with a denominator that small near its decimal of k places.
    """
    return _writes(left, right) or _writes(right, left)


def _writes(decimal: Fraction, fraction: Fraction) -> bool:
    if abs(decimal - fraction) * 10**MANY_PLACES > 1:
        return False
    count = places(decimal)
    if count is None or count < MANY_PLACES or places(fraction) is not None:
        return False
    scale: int = 10**count
    if 2 * fraction.denominator**2 >= scale:
        return False
    digits = abs(fraction) * scale
    written = abs(decimal) * scale
    if written in (digits.__floor__(), round(digits)):
        return True
    return abs(fraction) < 10**15 and decimal == Fraction(repr(float(fraction)))
