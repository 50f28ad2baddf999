"""Chains of linear equations, such as a line in space: equal if they have the same solutions."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

from lemma.grading import evaluate
from lemma.grading.evaluate import NotRational, Undefined
from lemma.grading.expression import Tree, Unreadable, read
from lemma.grading.structure import Leaf, Relation

Row = list[Fraction]
_MOST_LETTERS = 6


def same_solutions(gold: Relation, answer: Relation) -> bool | None:
    """Whether two chains a = b = c of linear forms describe the same points; None if they are something else.

    A zero denominator, as in the canonical equations of a line, means that the numerator is zero.
    """
    trees = [_sides(gold), _sides(answer)]
    if trees[0] is None or trees[1] is None:
        return None
    letters = [frozenset().union(*map(evaluate.symbols, sides)) for sides in trees if sides]
    if not 2 <= len(letters[0]) <= _MOST_LETTERS:
        return None
    if letters[0] != letters[1]:
        return False
    names = sorted(letters[0])
    try:
        systems = [_reduced(_equations(sides, names)) for sides in trees if sides]
    except (NotRational, Undefined):
        return None
    return systems[0] == systems[1]


def _sides(relation: Relation) -> list[Tree] | None:
    """The sides of a chain of three or more, each of them with a letter."""
    if len(relation.sides) < 3 or set(relation.signs) != {"="}:
        return None
    trees = []
    for side in relation.sides:
        if not isinstance(side, Leaf):
            return None
        try:
            trees.append(read(side.tokens))
        except Unreadable:
            return None
    return trees if all(evaluate.symbols(tree) for tree in trees) else None


def _equations(sides: list[Tree], names: list[str]) -> list[Row]:
    rows, forms = [], []
    for tree in sides:
        if tree[0] == "div" and not evaluate.symbols(tree[2]) and not evaluate.exact(tree[2], 0):
            rows.append(_form(tree[1], names))
        else:
            forms.append(_form(tree, names))
    rows += [[a - b for a, b in zip(left, right, strict=True)] for left, right in pairwise(forms)]
    return rows


def _form(tree: Tree, names: list[str]) -> Row:
    """The coefficients of a linear form, the constant last. Raises NotRational if it is not linear."""
    zero = dict.fromkeys(names, Fraction(0))
    constant = _value(tree, zero)
    row = [_value(tree, zero | {name: Fraction(1)}) - constant for name in names]
    for index in range(2):
        there = {name: evaluate.signed_point(name, index) for name in names}
        if _value(tree, there) != constant + sum(c * there[n] for c, n in zip(row, names, strict=True)):
            raise NotRational
    return [*row, constant]


def _value(tree: Tree, values: dict[str, Fraction]) -> Fraction:
    return evaluate.exact(evaluate.put(tree, values), 0)


def _reduced(rows: list[Row]) -> list[Row]:
    """The reduced row echelon form, without rows of zeros: identical for all systems with the same solutions."""
    rows = [list(row) for row in rows]
    done = 0
    for column in range(len(rows[0]) if rows else 0):
        pivot = next((i for i in range(done, len(rows)) if rows[i][column]), None)
        if pivot is None:
            continue
        rows[done], rows[pivot] = rows[pivot], rows[done]
        lead = rows[done][column]
        rows[done] = [value / lead for value in rows[done]]
        for i, row in enumerate(rows):
            if i != done and row[column]:
                factor = row[column]
                rows[i] = [a - factor * b for a, b in zip(row, rows[done], strict=True)]
        done += 1
    return rows[:done]
