"""A calculator: exact on whole numbers, fractions and decimals, and limited before anything large is computed."""

from __future__ import annotations

import ast
import math
import operator
import warnings
from collections.abc import Callable
from fractions import Fraction
from typing import Any

LONGEST = 1000
LARGEST_BITS = 8192
LARGEST_COUNT = 1000
DIGITS = 12

Number = Fraction | float
OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
SPELLINGS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "^": "**"})
NAMES: dict[str, Number] = {"pi": math.pi, "e": math.e}


class _Refused(ValueError):
    """What was asked is no calculation, or too large a one; the sentence says why."""


def calculator(expression: str) -> str:
    """Compute an arithmetic expression exactly.

    Args:
        expression: For example (3 + 4) * 5 / 2; with + - * / // % ** and functions such as sqrt.
    """
    try:
        return written(evaluate(expression))
    except _Refused as error:
        return f"error: {error}"
    except ZeroDivisionError:
        return "error: division by zero"
    except (ValueError, OverflowError, RecursionError, MemoryError):
        return "error: this has no value, or one that is too large"


def evaluate(expression: str) -> Number:
    if len(expression) > LONGEST:
        raise _Refused(f"the expression is longer than {LONGEST} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            tree = ast.parse(" ".join(expression.translate(SPELLINGS).split()), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise _Refused("this is not an arithmetic expression") from None
    return _value(tree.body)


def written(value: Number) -> str:
    """Whole numbers and short decimals as they are, other fractions followed by their decimals."""
    if isinstance(value, float):
        return f"{value:.{DIGITS}g}"
    if value.denominator == 1:
        return str(value.numerator)
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    decimals = f"{float(value):.{DIGITS}g}"
    if rest == 1 and Fraction(decimals) == value:
        return decimals
    return f"{value.numerator}/{value.denominator} = {decimals}"


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _limited(Fraction(repr(number)))
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_value(inner)
        case ast.UnaryOp(op=ast.UAdd(), operand=inner):
            return _value(inner)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return _limited(OPERATORS[type(op)](_value(left), _value(right)))
        case ast.Name(id=name) if name in NAMES:
            return NAMES[name]
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in FUNCTIONS:
            return _call(name, [_value(one) for one in arguments])
    raise _Refused(
        f"'{ast.unparse(node)[:40]}' is no arithmetic; use numbers, + - * / // % ** and {', '.join(FUNCTIONS)}"
    )


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if bits * abs(exponent.numerator) > LARGEST_BITS:
            raise _Refused("the power is too large")
        return _limited(base**exponent.numerator)
    if exponent == Fraction(1, 2):
        return _sqrt(base)
    return _limited(float(base) ** float(exponent))


def _sqrt(value: Number) -> Number:
    if isinstance(value, Fraction) and value >= 0:
        top, bottom = math.isqrt(value.numerator), math.isqrt(value.denominator)
        if top * top == value.numerator and bottom * bottom == value.denominator:
            return Fraction(top, bottom)
    return math.sqrt(value)


def _factorial(count: Number) -> Number:
    if count != int(count) or not 0 <= count <= LARGEST_COUNT:
        raise _Refused(f"factorial takes whole numbers up to {LARGEST_COUNT}")
    return Fraction(math.factorial(int(count)))


def _round(value: Number, digits: Number = Fraction(0)) -> Number:
    if not -LARGEST_COUNT <= digits <= LARGEST_COUNT:
        raise _Refused("round takes a small number of digits")
    return Fraction(round(Fraction(value), int(digits)))


FUNCTIONS: dict[str, Callable[..., Number]] = {
    "abs": abs, "min": min, "max": max, "round": _round, "floor": lambda value: Fraction(math.floor(value)),
    "ceil": lambda value: Fraction(math.ceil(value)), "sqrt": _sqrt, "factorial": _factorial,
    "gcd": lambda *values: Fraction(math.gcd(*map(_whole, values))), "log": lambda value: math.log(value),
    "exp": lambda value: math.exp(value), "sin": lambda value: math.sin(value), "cos": lambda value: math.cos(value),
    "tan": lambda value: math.tan(value),
}  # fmt: skip


def _whole(value: Number) -> int:
    if value != int(value):
        raise _Refused("gcd takes whole numbers")
    return int(value)


def _call(name: str, arguments: list[Number]) -> Number:
    try:
        return _limited(FUNCTIONS[name](*arguments))
    except TypeError:
        raise _Refused(f"{name} does not take {len(arguments)} arguments") from None


def _limited(value: Number) -> Number:
    """The value, where it can be written down."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise OverflowError
        return value
    if isinstance(value, complex):
        raise _Refused("the result is not a real number")
    fraction = Fraction(value)
    if max(fraction.numerator.bit_length(), fraction.denominator.bit_length()) > 2 * LARGEST_BITS:
        raise _Refused("the number is too large")
    return fraction
