"""Vectors written with unit vectors, 2i + 3j, against each other and against their components."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from lemma.grading import evaluate
from lemma.grading.evaluate import Undefined
from lemma.grading.expression import UNIT_VECTORS, Tree, Unreadable, read
from lemma.grading.single import Context, same_value
from lemma.grading.structure import Leaf, Node
from lemma.grading.tokens import Token, tokenise


def has_unit_vectors(node: Node) -> bool:
    """Whether a leaf contains `\\hat{i}` or another unit vector."""
    return isinstance(node, Leaf) and any(t.kind == "cmd" and t.value == "hat" for t in node.tokens)


def with_unit_vectors(leaf: Leaf) -> Leaf:
    """The leaf with its plain letters i, j, k as unit vectors, if j or k is among them; otherwise as it is."""
    if has_unit_vectors(leaf) or not any(t.kind == "id" and t.value in "jk" for t in leaf.tokens):
        return leaf
    tokens: list[Token] = []
    for token in leaf.tokens:
        plain = token.kind == "id" and token.value in "ijk"
        tokens += tokenise("\\hat{" + token.value + "}") if plain else [token]
    return Leaf(tuple(tokens), leaf.unit)


def same_vector(gold: Leaf | Sequence[Node], answer: Leaf | Sequence[Node], context: Context) -> bool:
    """Whether a sum of unit vectors and a list of two or three components are the same vector."""
    size = len(answer) if not isinstance(answer, Leaf) else len(gold) if not isinstance(gold, Leaf) else 3
    left, right = (_components(side, size) for side in (gold, answer))
    if left is None or right is None:
        return False
    return all(same_value(a, b, Fraction(1), context) for a, b in zip(left, right, strict=True))


def _components(side: Leaf | Sequence[Node], size: int) -> list[Tree] | None:
    try:
        if not isinstance(side, Leaf):
            return [read(item.tokens) for item in side if isinstance(item, Leaf)] if len(side) == size else None
        tree = read(side.tokens)
        used = evaluate.symbols(tree) & set(UNIT_VECTORS)
        if size not in (2, 3) or not used <= set(UNIT_VECTORS[:size]) or not _is_linear(tree):
            return None
    except (Unreadable, Undefined):
        return None
    return [_at(tree, [int(i == place) for i in range(3)]) for place in range(size)]


def _at(tree: Tree, values: Sequence[int]) -> Tree:
    return evaluate.put(tree, dict(zip(UNIT_VECTORS, map(Fraction, values), strict=True)))


def _is_linear(tree: Tree) -> bool:
    """Whether a tree is a sum of multiples of the unit vectors, judged at one point."""
    values = [
        evaluate.numeric(_at(tree, place), 0) for place in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2, -3, 5))
    ]
    expected = 2 * values[1] - 3 * values[2] + 5 * values[3]
    tiny = evaluate._context().mpf(10) ** -30
    return bool(abs(values[0]) <= tiny and abs(values[4] - expected) <= tiny * (1 + abs(expected)))
