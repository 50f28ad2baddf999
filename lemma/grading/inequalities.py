"""Inequalities in one letter solved: linear ones, quadratic ones, and absolute values of linear forms."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from lemma.grading import evaluate
from lemma.grading.evaluate import Undefined
from lemma.grading.expression import Tree, Unreadable, read
from lemma.grading.linear import put
from lemma.grading.structure import Leaf, Node


def letter_of(nodes: tuple[Node, ...]) -> str:
    """The one letter of these sides; empty if there is none, or several, or a side cannot be read."""
    letters: frozenset[str] = frozenset()
    for node in nodes:
        try:
            letters |= evaluate.symbols(read(node.tokens)) if isinstance(node, Leaf) else frozenset({"", " "})
        except Unreadable:
            return ""
    return next(iter(letters)) if len(letters) == 1 else ""


def boundaries(left: Tree, right: Tree, letter: str) -> list[Any] | None:
    """The numbers where the two sides meet, in order; None if they are not of one of the known forms.

    Between two of them, one side is larger throughout.
    """
    if left[0] == "abs" and not evaluate.symbols(right):
        return _both(left[1], right, letter)
    if right[0] == "abs" and not evaluate.symbols(left):
        return _both(right[1], left, letter)
    return _zeros(("add", left, ("neg", right)), letter)


def _both(inside: Tree, bound: Tree, letter: str) -> list[Any] | None:
    """Where the absolute value of a linear form is the bound."""
    if evaluate.contains(inside, "abs"):
        return None
    zeros = [_zeros(("add", inside, sign), letter) for sign in (bound, ("neg", bound))]
    if any(found is None or len(found) > 1 for found in zeros):
        return None
    return sorted({zero for found in zeros if found for zero in found}) if _at(bound, letter, 0) >= 0 else []


def _zeros(tree: Tree, letter: str) -> list[Any] | None:
    """The real zeros of a polynomial of degree two at most."""
    mp = evaluate._context()
    if any(evaluate.contains(tree, name) for name in ("abs", "floor", "ceil", "mod", "call", "fact")):
        return None
    try:
        c, up, down = (_at(tree, letter, x) for x in (0, 1, -1))
        a, b = (up + down) / 2 - c, (up - down) / 2
        tiny = mp.mpf(10) ** (10 - mp.dps)
        for x in (7, Fraction(-13, 5)):
            value = (a * x.numerator / x.denominator + b) * x.numerator / x.denominator + c
            if abs(value - _at(tree, letter, x)) > tiny * (1 + abs(value)):
                return None
    except (Undefined, TypeError):
        return None
    if abs(a) <= tiny:
        return [-c / b] if abs(b) > tiny else None
    inside = b * b - 4 * a * c
    if inside < -tiny:
        return []
    root = mp.sqrt(inside) if inside > tiny else mp.mpf(0)
    return sorted({(-b - root) / (2 * a), (-b + root) / (2 * a)})


def _at(tree: Tree, letter: str, x: int | Fraction) -> Any:
    """The real value of a tree where its letter has this value."""
    value = evaluate.numeric(put(tree, {letter: Fraction(x)}), 0)
    if isinstance(value, evaluate._context().mpc):
        raise Undefined
    return value


def holds(left: Tree, sign: str, right: Tree, letter: str, x: Any) -> bool:
    """Whether the inequality holds at a number that is not one of its boundaries, or very near to it."""
    near = Fraction(int(x * 2**64), 2**64)
    difference = _at(left, letter, near) - _at(right, letter, near)
    return bool(difference < 0) if sign in ("<", "<=") else bool(difference > 0) if sign in (">", ">=") else True
