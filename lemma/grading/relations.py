"""Equations and inequalities: against each other, against values, against intervals."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from typing import Any

from lemma.grading import evaluate
from lemma.grading.evaluate import NotRational, Undefined
from lemma.grading.expression import GREEK, Tree, Unreadable, read
from lemma.grading.limits import GoldLimit, LimitExceeded
from lemma.grading.linear import same_solutions
from lemma.grading.precision import enough_digits
from lemma.grading.realsets import FLIP, NotASet, is_reals, is_variable, letter_of, same_set
from lemma.grading.single import Context, is_text
from lemma.grading.structure import Leaf, Listed, Minus, Node, Relation, Union, text_of
from lemma.grading.tokens import Token

_ARROW = re.compile(r"\\(?:to|rightarrow)(?![A-Za-z])")
_SYMMETRIC = frozenset({"perp", "parallel", "cong", "iff"})
_UNKNOWNS = frozenset("xyz")


def against_value(gold: Node, answer: Relation, context: Context) -> bool:
    """The answer is a relation and the gold is not: take its value, or the set it describes."""
    conditions = isinstance(gold, Listed) and any(
        isinstance(item, Relation) and _is_inequality(item) for item in gold.items
    )
    if _is_inequality(answer) and (
        isinstance(gold, Union | Minus) or (isinstance(gold, Listed) and (gold.opening or conditions))
    ):
        return _is_solved(answer) and _same_set(gold, answer)
    if isinstance(gold, Leaf) and is_reals(gold):
        return False
    if set(answer.signs) <= {"=", "~"}:
        return context.same(gold, value_side(answer))
    return False


def contradicts(node: Node, context: Context) -> bool:
    """Whether a part of an answer says that two different numbers are equal; a decimal may be a rounded value.

    In a chain that gives a name its value, x = 5 + 5 = 11, the last side is the value of x. Congruences and arrows,
    which are parsed as equations elsewhere, do not count.
    """
    if any(arrow in context.answer for arrow in ("\\equiv", "\\to", "\\rightarrow")):
        return False
    if isinstance(node, Listed | Union):
        return any(contradicts(item, context) for item in node.items)
    if not isinstance(node, Relation) or is_name(node.sides[0]):
        return False
    last: Leaf | None = None
    for sign, side in zip(("~", *node.signs), node.sides, strict=True):
        if sign != "=":
            last = None
        if isinstance(side, Leaf) and _is_number(side):
            if last is not None and not _may_equal(last, side, context):
                return True
            last = side
    return False


def _is_number(leaf: Leaf) -> bool:
    try:
        tree = read(leaf.tokens)
    except (Unreadable, LimitExceeded):
        return False
    return not is_text(leaf.tokens) and not evaluate.symbols(tree) and not evaluate.contains(tree, "call")


def _may_equal(left: Leaf, right: Leaf, context: Context) -> bool:
    """Whether two numbers are equal, or one is the other rounded or truncated to its decimal places."""
    try:
        if left.unit != right.unit or context.same(left, right):
            return True
        for decimal, other in ((left, right), (right, left)):
            whole, point, places = text_of(decimal).lstrip("+-").partition(".")
            if point and (whole + places).isdigit():
                rules = context.rules.model_copy(update={"absolute": max(context.rules.absolute, 10.0 ** -len(places))})
                if replace(context, rules=rules).same(decimal, other):
                    return True
    except GoldLimit as error:
        raise LimitExceeded from error
    return False


def value_against(gold: Relation, answer: Node, context: Context) -> bool:
    if set(gold.signs) <= {"=", "~"}:
        if "~" in gold.signs and not is_name(gold.sides[0]):
            return any(context.same(side, answer) for side in (gold.sides[0], gold.sides[-1]))
        return is_name(gold.sides[0]) and context.same(gold.sides[-1], answer)
    return not isinstance(answer, Leaf) and _same_set(gold, answer)


def _same_set(gold: Node, answer: Node) -> bool:
    """Whether the two are the same set of numbers, with numbers at its ends."""
    with suppress(NotASet):
        return same_set(gold, answer)
    return False


def value_side(relation: Relation) -> Node:
    """The last side of a chain of equations; for an approximation, the exact side before it."""
    if "~" in relation.signs:
        place = relation.signs.index("~")
        left, right = relation.sides[place : place + 2]
        if isinstance(left, Leaf) and isinstance(right, Leaf) and "." in text_of(left) and "." not in text_of(right):
            return right
        if place > 0 or not is_name(relation.sides[0]):
            return relation.sides[place]
    return relation.sides[-1]


def is_name(node: Node) -> bool:
    """Whether a side only names what follows: a letter, f(x), a word, a tuple of letters; no numbers outside
    arguments."""
    if isinstance(node, Listed):
        return all(is_name(item) for item in node.items)
    if not isinstance(node, Leaf) or not node.tokens:
        return False
    first = node.tokens[0]
    if len(node.tokens) > 2 and (first.kind == "id" or first.value in GREEK) and node.tokens[1].kind in ("(", "_", "'"):
        return True
    if is_text(node.tokens):
        return True
    return not any(
        t.kind in ("num", "+", "-") or t.value == "pi" or (t.kind == "word" and set(t.value) <= _UNKNOWNS)
        for t in node.tokens
    )


def _is_solved(relation: Relation) -> bool:
    """Whether an inequality bounds a letter or an absolute value; others are still to be solved."""
    sides = [side for side in relation.sides if isinstance(side, Leaf) and letter_of((side,))]
    return _is_inequality(relation) and all(
        is_variable(s) or s.tokens[0].kind + s.tokens[-1].kind == "||" for s in sides
    )


def _is_inequality(relation: Relation) -> bool:
    return set(relation.signs) <= {"<", ">", "<=", ">=", "!="}


def same_relation(gold: Relation, answer: Relation, context: Context) -> bool:
    """Whether two equations, or two inequalities, say the same. Implications and the like keep their sides in order."""
    if set(gold.signs) - FLIP.keys() or set(answer.signs) - FLIP.keys() or _ARROW.search(context.gold):
        orders = (answer.sides, answer.sides[::-1]) if gold.signs[0] in _SYMMETRIC else (answer.sides,)
        return gold.signs == answer.signs and any(all(map(context.same, gold.sides, sides)) for sides in orders)
    if _is_inequality(gold) and _is_solved(answer) and letter_of(gold.sides) == letter_of(answer.sides) != "":
        with suppress(NotASet):
            return same_set(gold, answer)
    if set(gold.signs) <= {"=", "~"} and set(answer.signs) <= {"=", "~"}:
        return _same_equation(gold, answer, context)
    for sides, signs in (
        (answer.sides, answer.signs),
        (answer.sides[::-1], tuple(FLIP[s] for s in answer.signs[::-1])),
    ):
        if gold.signs == signs and all(context.same(g, a) for g, a in zip(gold.sides, sides, strict=True)):
            return True
    if len(gold.signs) == len(answer.signs) == 1:
        return _proportional(gold, answer, context)
    return False


def _same_equation(gold: Relation, answer: Relation, context: Context) -> bool:
    if len(gold.sides) > 2:
        solved = same_solutions(gold, answer)
        if solved is not None:
            return solved
    first, other = gold.sides[0], answer.sides[0]
    if isinstance(first, Leaf) and isinstance(other, Leaf):
        if is_text(first.tokens) or is_text(other.tokens) or text_of(first) == text_of(other):
            if context.same(value_side(gold), value_side(answer)):
                return True
        elif {text_of(first), text_of(other)} in ({"y", "f(x)"}, {"y", "g(x)"}):
            return context.same(value_side(gold), value_side(answer))
        elif _renamed(first, other) is not None:
            old, new = _renamed(first, other) or ("", "")
            side = _rename(value_side(answer), new, old)
            return context.same(value_side(gold), side)
    elif context.same(first, other) and context.same(gold.sides[-1], answer.sides[-1]):
        return True
    if len(gold.sides) == 2 and len(answer.sides) == 2:
        return _proportional(gold, answer, context)
    if is_name(first) and is_name(other) and isinstance(first, Leaf) and isinstance(other, Leaf):
        return text_of(first) == text_of(other) and context.same(gold.sides[-1], answer.sides[-1])
    return all(context.same(g, a) for g, a in zip(gold.sides, answer.sides, strict=False)) and len(gold.sides) == len(
        answer.sides
    )


def _renamed(first: Leaf, other: Leaf) -> tuple[str, str] | None:
    """f(x) against f(t): the two bound letters."""
    left, right = first.tokens, other.tokens
    kinds = [t.kind for t in left], [t.kind for t in right]
    if left and kinds[0] == kinds[1] == [left[0].kind, "(", "id", ")"] and left[0].value == right[0].value:
        return left[2].value, right[2].value
    return None


def _rename(node: Node, old: str, new: str) -> Node:
    if not isinstance(node, Leaf):
        return node
    tokens = tuple(Token(t.kind, new, t.start, t.end) if t.kind == "id" and t.value == old else t for t in node.tokens)
    return Leaf(tokens, node.unit)


def _difference(relation: Relation) -> Tree | None:
    left, right = relation.sides
    if not isinstance(left, Leaf) or not isinstance(right, Leaf):
        return None
    try:
        trees = read(left.tokens), read(right.tokens)
    except Unreadable:
        return None
    return ("add", trees[0], ("neg", trees[1]))


def _proportional(gold: Relation, answer: Relation, context: Context) -> bool:
    """a = b and c = d are the same if a - b is a constant multiple of c - d; for an inequality, a positive multiple."""
    sign = answer.signs[0]
    if gold.signs[0] != sign and gold.signs[0] != FLIP[sign]:
        return False
    left, right = _difference(gold), _difference(answer)
    if left is None or right is None:
        text = context.gold, context.answer
        return (
            False
            if any(isinstance(s, Leaf) and is_text(s.tokens) for s in (*gold.sides, *answer.sides))
            else context.symbolic(*text)
        )
    if not evaluate.symbols(left) or evaluate.symbols(left) != evaluate.symbols(right):
        return False
    direction = _common_factor(left, right)
    if not direction or sign in ("=", "!=", "~"):
        return bool(direction)
    return (direction > 0) == (gold.signs[0] == sign)


def _common_factor(left: Tree, right: Tree) -> int:
    """The sign of the factor if left is a constant multiple of right at every point; otherwise 0."""
    with enough_digits(left, right, factors=2) as close:
        values = [pair for index in range(4) if (pair := _values(left, right, index)) and pair[1]]
        if not values or not values[0][0]:
            return 0
        exact = all(isinstance(value, Fraction) for pair in values for value in pair)
        if not exact:
            values = [(_real(top), _real(bottom)) for top, bottom in values]
        first, under = values[0]
        for top, bottom in values[1:]:
            if (top * under != first * bottom) if exact else not close(top * under, first * bottom):
                return 0
        factor = first / under
        return 1 if (factor if exact else evaluate._context().re(factor)) > 0 else -1


def _values(left: Tree, right: Tree, index: int) -> tuple[Any, Any] | None:
    try:
        try:
            return evaluate.exact(left, index), evaluate.exact(right, index)
        except NotRational:
            return evaluate.numeric(left, index), evaluate.numeric(right, index)
    except Undefined:
        return None


def _real(value: Any) -> Any:
    return evaluate._context().mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value
