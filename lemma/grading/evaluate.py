"""The value of an expression tree: exact fractions where possible, otherwise fifty digits, at fixed points.

Two polynomials or rational functions that agree at several fixed pseudo-random points are the same (the chance of an
accident is below 1e-9 for anything that fits the limits); other functions are compared to as many digits as the sizes
of their numbers require.
"""

from __future__ import annotations

import hashlib
import math
import threading
from fractions import Fraction
from functools import lru_cache
from typing import Any

from lemma.grading.expression import Tree
from lemma.grading.limits import MAX_BITS, MAX_EXPONENT, MAX_STEPS, LimitExceeded

DIGITS = 50
_local = threading.local()


class NotRational(Exception):
    """The value is not a fraction, or not known to be one."""


class Undefined(Exception):
    """No value at this point: a pole, or an undetermined form."""


@lru_cache(maxsize=4096)
def symbols(tree: Tree) -> frozenset[str]:
    """Names of the letters in a tree."""
    if tree[0] == "sym":
        return frozenset({tree[1]})
    names: frozenset[str] = frozenset()
    for part in tree[1:]:
        if isinstance(part, tuple):
            names |= symbols(part)
    return names


@lru_cache(maxsize=4096)
def contains(tree: Tree, name: str) -> bool:
    """Whether an operation or a constant of this name occurs."""
    return name in (tree[0], tree[1] if tree[0] == "const" else "") or any(
        contains(part, name) for part in tree[1:] if isinstance(part, tuple)
    )


def fraction_of(tree: Tree) -> Fraction | None:
    """The value of a tree that is a number or a quotient of two, perhaps negative."""
    if tree[0] == "neg":
        value = fraction_of(tree[1])
        return None if value is None else -value
    if tree[0] == "div" and tree[1][0] == tree[2][0] == "num" and tree[2][1]:
        return Fraction(tree[1][1] / tree[2][1])
    return tree[1] if tree[0] == "num" else None


@lru_cache(maxsize=4096)
def has_fractional_power(tree: Tree) -> bool:
    """Whether a power with a fraction as exponent occurs."""
    if tree[0] == "pow" and (value := fraction_of(tree[2])) is not None and value.denominator > 1:
        return True
    return any(has_fractional_power(part) for part in tree[1:] if isinstance(part, tuple))


def put(tree: Tree, values: dict[str, Fraction]) -> Tree:
    """The tree with numbers in place of its letters."""
    if tree[0] == "sym":
        return ("num", values[tree[1]]) if tree[1] in values else tree
    return (tree[0], *(put(part, values) if isinstance(part, tuple) else part for part in tree[1:]))


@lru_cache(maxsize=8192)
def point(name: str, index: int) -> Fraction:
    """The value of a letter at the fixed point with this number: a fraction between 1/2 and 4."""
    named = f"{index}:{name}".encode(errors="surrogatepass")
    noise = int.from_bytes(hashlib.blake2b(named, digest_size=4).digest(), "little")
    return Fraction(503 + noise % 3989, 1009)


def signed_point(name: str, index: int) -> Fraction:
    """Like `point`, but negative at the second point, and large and of either sign at the third."""
    value = point(name, index)
    if index == 1:
        return -value
    return value * (997 if value.numerator % 2 else -997) if index == 2 else value


def unknown_function(name: str, argument: Any) -> Any:
    """The value of an unknown function, such as f(3): a fixed value that depends on name and argument."""
    first, second = point(f"{name}()", 0), point(f"{name}()", 1)
    top = argument * first.numerator + second.numerator
    return top / (argument * argument * 1009 + second.numerator + first.numerator)


def exact(tree: Tree, index: int, modes: tuple[bool, bool] = (True, True)) -> Fraction:
    """The exact value at a point; raises NotRational if roots, functions or constants are involved."""
    return _Exact(index, modes).value(tree)


class _Exact:
    def __init__(self, index: int, modes: tuple[bool, bool]):
        self.index, self.modes, self.steps = index, modes, 0

    def value(self, tree: Tree) -> Fraction:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise LimitExceeded("size of an expression")
        name = tree[0]
        if name == "num":
            value: Fraction = tree[1]
            return value
        if name == "sym":
            return signed_point(tree[1], self.index)
        if name == "add":
            return sum((self.value(part) for part in tree[1:]), Fraction(0))
        if name == "neg":
            return -self.value(tree[1])
        if name == "mul":
            return self.small(self.value(tree[1])) * self.small(self.value(tree[2]))
        if name == "div":
            top, bottom = self.value(tree[1]), self.value(tree[2])
            if not bottom:
                raise Undefined
            return top / bottom
        if name == "pow":
            return self.power(self.value(tree[1]), self.value(tree[2]))
        if name == "pct":
            return self.value(tree[1]) / (100 if self.modes[1] else 1)
        if name == "deg" and not self.modes[0]:
            return self.value(tree[1])
        return self.rare(tree)

    def rare(self, tree: Tree) -> Fraction:
        name = tree[0]
        if name in ("abs", "floor", "ceil"):
            value = self.value(tree[1])
            return abs(value) if name == "abs" else Fraction(value.__floor__() if name == "floor" else value.__ceil__())
        if name == "mod":
            top, bottom = self.value(tree[1]), self.value(tree[2])
            if not bottom:
                raise Undefined
            return top % bottom
        if name == "fact":
            value = self.value(tree[1])
            if value.denominator != 1 or value < 0:
                raise NotRational
            return self.product(1, self.whole(value))
        if name == "binom":
            top, bottom = self.value(tree[1]), self.value(tree[2])
            if top.denominator != 1 or bottom.denominator != 1 or not 0 <= bottom <= top:
                raise NotRational
            k = int(min(bottom, top - bottom))
            return self.product(self.whole(top) - k + 1, self.whole(top)) / self.product(1, k)
        if name in ("min", "max", "gcd", "lcm"):
            return self.extreme(name, [self.value(part) for part in tree[1:]])
        if name == "call":
            return Fraction(unknown_function(tree[1], self.small(self.value(tree[2]))))
        raise NotRational

    def extreme(self, name: str, values: list[Fraction]) -> Fraction:
        if name in ("min", "max"):
            return min(values) if name == "min" else max(values)
        if any(value.denominator != 1 for value in values):
            raise NotRational
        whole = [int(self.small(value)) for value in values]
        return Fraction(math.gcd(*whole) if name == "gcd" else math.lcm(*whole))

    def whole(self, value: Fraction) -> int:
        if value > MAX_EXPONENT:
            raise LimitExceeded("factorial")
        return int(value)

    def product(self, first: int, last: int) -> Fraction:
        result = 1
        for factor in range(first, last + 1):
            result *= factor
            if result.bit_length() > MAX_BITS:
                raise LimitExceeded("factorial")
        return Fraction(result)

    def small(self, value: Fraction) -> Fraction:
        if value.numerator.bit_length() > MAX_BITS or value.denominator.bit_length() > MAX_BITS:
            raise LimitExceeded("size of a number")
        return value

    def power(self, base: Fraction, exponent: Fraction) -> Fraction:
        if exponent.denominator != 1:
            raise NotRational
        size = max(base.numerator.bit_length(), base.denominator.bit_length())
        if abs(base) != 1 and base and size * abs(exponent) > MAX_BITS:
            raise LimitExceeded("exponent")
        if not base and exponent < 0:
            raise Undefined
        if abs(base) == 1:
            return base if exponent % 2 else Fraction(1)
        return base ** int(exponent)


def _context() -> Any:
    context = getattr(_local, "context", None)
    if context is None:
        import mpmath

        context = mpmath.mp.clone() if hasattr(mpmath.mp, "clone") else mpmath.MPContext()
        context.dps = DIGITS
        _local.context = context
    return context


def numeric(tree: Tree, index: int, modes: tuple[bool, bool] = (True, True), negative: bool = False) -> Any:
    """The value at a point, real or complex, in the current precision; `negative` makes letters negative."""
    value = _Numeric(index, modes, negative).value(tree)
    context = _context()
    if context.isnan(value) or (context.isinf(value) and not contains(tree, "inf")):
        raise Undefined
    return value


class _Numeric:
    def __init__(self, index: int, modes: tuple[bool, bool], negative: bool):
        self.index, self.modes, self.negative, self.steps, self.mp = index, modes, negative, 0, _context()

    def value(self, tree: Tree, inside: bool = False) -> Any:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise LimitExceeded("size of an expression")
        name, mp = tree[0], self.mp
        if name == "num":
            return mp.mpf(tree[1].numerator) / tree[1].denominator
        if name == "sym":
            fraction = point(tree[1], self.index)
            return mp.mpf(-fraction.numerator if self.negative else fraction.numerator) / fraction.denominator
        if name == "const":
            return {"pi": mp.pi, "e": mp.e, "inf": mp.inf}.get(tree[1], mp.mpc(0, 1)) * 1
        if name == "add":
            return mp.fsum(self.value(part, inside) for part in tree[1:])
        if name == "neg":
            return -self.value(tree[1], inside)
        if name == "mul":
            return self.value(tree[1], inside) * self.value(tree[2], inside)
        if name == "div":
            return self.divide(self.value(tree[1], inside), self.value(tree[2], inside))
        if name == "pow":
            return self.power(self.value(tree[1], inside), self.value(tree[2], inside), fraction_of(tree[2]))
        if name == "root":
            return self.root(self.value(tree[1], inside), self.value(tree[2], inside))
        if name == "fun":
            return self.function(tree[1], self.value(tree[2], True))
        if name == "deg":
            return self.value(tree[1], inside) * (mp.pi / 180 if inside or self.modes[0] else 1)
        if name == "pct":
            return self.value(tree[1], inside) / (100 if self.modes[1] else 1)
        if name == "call":
            return unknown_function(tree[1], self.value(tree[2], inside))
        return self.rare(name, [self.value(part, inside) for part in tree[1:]])

    def divide(self, top: Any, bottom: Any) -> Any:
        if not bottom:
            raise Undefined
        return top / bottom

    def power(self, base: Any, exponent: Any, fraction: Fraction | None = None) -> Any:
        """A power; the real one if the base is negative and the exponent a fraction with an odd denominator."""
        self.bounded(exponent)
        odd = fraction is not None and fraction.denominator % 2 and fraction.denominator > 1
        if fraction is not None and odd and not isinstance(base, self.mp.mpc) and base < 0:
            return self.mp.power(-base, exponent) * (-1 if fraction.numerator % 2 else 1)
        if not base and self.mp.re(exponent) <= 0:
            raise Undefined
        return self.mp.power(base, exponent)

    def bounded(self, value: Any) -> None:
        if not self.mp.isinf(value) and abs(value) > MAX_EXPONENT:
            raise LimitExceeded("exponent")

    def root(self, value: Any, index: Any) -> Any:
        if index == 2:
            return self.mp.sqrt(value)
        real = not isinstance(value, self.mp.mpc)
        if real and value < 0 and index == int(self.mp.re(index)) and int(index) % 2:
            return -self.power(-value, 1 / index)
        return self.power(value, self.divide(self.mp.mpf(1), index))

    def function(self, name: str, value: Any) -> Any:
        mp = self.mp
        if name in ("exp", "sinh", "cosh", "tanh", "coth"):
            self.bounded(value)
        elif name != "ln" and not mp.isinf(value) and abs(value) > mp.mpf(10) ** 30:
            raise LimitExceeded("argument of a function")
        if name == "ln" and not value:
            raise Undefined
        table = {
            "ln": mp.ln, "exp": mp.exp, "sin": mp.sin, "cos": mp.cos, "tan": mp.tan, "cot": mp.cot, "sec": mp.sec,
            "csc": mp.csc, "arcsin": mp.asin, "arccos": mp.acos, "arctan": mp.atan, "arccot": mp.acot,
            "sinh": mp.sinh, "cosh": mp.cosh, "tanh": mp.tanh, "coth": mp.coth,
        }  # fmt: skip
        return table[name](value)

    def rare(self, name: str, values: list[Any]) -> Any:
        mp = self.mp
        for value in values:
            self.bounded(value)
        if name == "abs":
            return abs(values[0])
        if name in ("floor", "ceil"):
            return getattr(mp, name)(values[0])
        if name == "fact":
            return mp.gamma(values[0] + 1)
        if name == "binom":
            return mp.binomial(values[0], values[1])
        if name == "mod":
            return mp.fmod(values[0], values[1])
        raise Undefined
