"""When a decimal stands for a fraction: it has many places, all of them right, and no other simple fraction fits."""

from __future__ import annotations

from fractions import Fraction

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
