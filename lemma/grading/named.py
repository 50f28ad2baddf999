"""Values with names: x = 3, y = -2 is the pair (3, -2), in alphabetical order if the letters are consecutive."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lemma.grading.structure import Leaf, Listed, Matrix, Node, Relation

_INDEXED = re.compile(r"([A-Za-z])_\{?(\d)\}?$")


def name_of(node: Node) -> str:
    """The letter that an equation `letter = value` names, with its index; empty for anything else."""
    if not isinstance(node, Relation) or not set(node.signs) <= {"=", "~"}:
        return ""
    side = node.sides[0]
    if not isinstance(side, Leaf) or not side.tokens or side.tokens[0].kind != "id":
        return ""
    text = "".join(token.value for token in side.tokens)
    return text if len(text) == 1 or _INDEXED.match(text) else ""


def ordered_names(items: Sequence[Node]) -> tuple[Node, ...]:
    """Equations for consecutive letters in alphabetical order; others unchanged."""
    names = [name_of(item) for item in items]
    if len(names) > 1 and all(len(name) == 1 for name in names) and _follow_on(names):
        return tuple(item for _, item in sorted(zip(names, items, strict=True), key=lambda pair: pair[0]))
    return tuple(items)


def _follow_on(names: Sequence[str]) -> bool:
    codes = sorted(map(ord, names))
    return codes == list(range(codes[0], codes[0] + len(codes)))


def by_names(node: Node) -> Node:
    """Solutions in one of the notations with names as a list of tuples, or as a bare list of equations."""
    if isinstance(node, Relation) and len(node.sides) == 2 and node.signs == ("=",):
        return _tuple_of_letters(_named_first(node))
    if isinstance(node, Matrix):
        rows = [row[0] for row in node.rows if len(row) == 1]
        equations = len(rows) == len(node.rows) > 1 and all(name_of(row) for row in rows)
        return by_names(Listed(tuple(rows))) if equations else node
    if not isinstance(node, Listed) or len(node.items) < 2:
        return node
    names = [name_of(item) for item in node.items]
    if not all(names):
        return node
    if len(set(names)) == len(names) and (node.opening == "\\{" or node.opening == "("):
        return Listed(node.items, join=node.join)
    groups = _groups(names)
    if groups is None or node.opening not in ("", "\\{"):
        return node
    return Listed(tuple(_tuple([node.items[i] for i in group]) for group in groups))


def _tuple(items: Sequence[Node]) -> Listed:
    return Listed(tuple(item.sides[-1] for item in ordered_names(items) if isinstance(item, Relation)), "(", ")")


def _groups(names: list[str]) -> list[list[int]] | None:
    """Indices of the equations of each solution: x, y, x, y or x_1, y_1, x_2, y_2."""
    indexed = [_INDEXED.match(name) for name in names]
    if all(indexed):
        pairs = [(m[2], m[1]) for m in indexed if m]
        letters, indices = {p[1] for p in pairs}, sorted({p[0] for p in pairs})
        if len(letters) > 1 and len(indices) > 1 and len(set(pairs)) == len(pairs) == len(letters) * len(indices):
            return [[i for i, pair in enumerate(pairs) if pair[0] == index] for index in indices]
        return None
    size = len(set(names))
    if size < 2 or len(names) == size or len(names) % size:
        return None
    groups = [list(range(start, start + size)) for start in range(0, len(names), size)]
    return groups if all(len({names[i] for i in group}) == size for group in groups) else None


def _named_first(relation: Relation) -> Relation:
    """5 = x as x = 5."""
    left, right = relation.sides
    turned = Relation((right, left), relation.signs)
    named = bool(name_of(turned)) and isinstance(right, Leaf) and len(right.tokens) == 1 and not name_of(relation)
    return turned if named else relation


def _tuple_of_letters(relation: Relation) -> Node:
    """(y, x) = (3, -2) in alphabetical order."""
    left, right = relation.sides
    if not isinstance(left, Listed) or not isinstance(right, Listed) or len(left.items) != len(right.items):
        return relation
    names = ["".join(t.value for t in item.tokens) if isinstance(item, Leaf) else "" for item in left.items]
    if not all(len(name) == 1 and name.isalpha() for name in names) or not _follow_on(names):
        return relation
    order = sorted(range(len(names)), key=lambda i: names[i])
    if order == list(range(len(names))):
        return relation
    sides = (Listed(tuple(side.items[i] for i in order), side.opening, side.closing) for side in (left, right))
    return Relation(tuple(sides), relation.signs)
