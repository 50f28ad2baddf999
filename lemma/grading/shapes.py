"""Whether two shapes are the same answer. The comparison is not symmetric: the gold decides what is asked."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from fractions import Fraction
from itertools import combinations, product

from lemma.grading import evaluate
from lemma.grading.evaluate import Undefined
from lemma.grading.expression import UNIT_VECTORS, Tree, Unreadable, number, read
from lemma.grading.limits import MAX_ITEMS, LimitExceeded
from lemma.grading.named import by_names, ordered_names
from lemma.grading.realsets import NotASet, is_reals, same_set
from lemma.grading.relations import (
    against_value,
    is_name,
    same_relation,
    value_against,
    value_side,
)
from lemma.grading.single import Context, is_text, same_leaf, same_value
from lemma.grading.structure import Leaf, Listed, Matrix, Minus, Node, Relation, Union, parts, text_of
from lemma.grading.tokens import Token, tokenise

_MOST_REPEATS = 40


def same(gold: Node, answer: Node, context: Context) -> bool:
    """Whether the answer is the gold, part by part."""
    gold, answer = by_names(_unwrapped(_expand(gold))), by_names(_unwrapped(_expand(answer)))
    if isinstance(gold, Relation) and isinstance(answer, Relation):
        return same_relation(gold, answer, context)
    if isinstance(answer, Relation):
        return against_value(gold, answer, context)
    if isinstance(gold, Relation):
        return value_against(gold, answer, context)
    if isinstance(gold, Leaf) != isinstance(answer, Leaf) or "\\hat" in context.gold or "\\hat" in context.answer:
        gold, answer = _as_vectors(gold, answer)
        if has_unit_vectors(gold) != has_unit_vectors(answer):
            left, right = _components(gold), _components(answer)
            return left is not None and right is not None and same_vector(left, right, context)
        gold, answer = _as_range(gold, answer), _as_range(answer, gold)
    if isinstance(gold, Leaf) and isinstance(answer, Leaf):
        return (is_reals(gold) and is_reals(answer)) or same_leaf(gold, answer, context)
    sets = any(isinstance(n, Union | Minus) or (isinstance(n, Leaf) and is_reals(n)) for n in (gold, answer))
    if sets or _has_relations(gold, answer):
        with suppress(NotASet):
            return same_set(gold, answer)
    if isinstance(gold, Minus) or isinstance(answer, Minus):
        return context.symbolic(context.gold, context.answer)
    if isinstance(gold, Union) or isinstance(answer, Union):
        left = gold.items if isinstance(gold, Union) else (gold,)
        right = answer.items if isinstance(answer, Union) else (answer,)
        return _same_unordered(left, right, context)
    if isinstance(gold, Matrix) or isinstance(answer, Matrix):
        return _same_matrix(gold, answer, context)
    return _same_listed(gold, answer, context)


def _as_vectors(gold: Node, answer: Node) -> tuple[Node, Node]:
    """Plain i, j, k are unit vectors where the other side is a vector."""
    pair = [gold, answer]
    for place, (node, other) in enumerate(((gold, answer), (answer, gold))):
        if isinstance(node, Leaf) and (has_unit_vectors(other) or _components(other) is not None):
            pair[place] = with_unit_vectors(node)
    return pair[0], pair[1]


def _components(node: Node) -> Leaf | tuple[Node, ...] | None:
    """What a vector is compared by: its sum of unit vectors, or its components in round brackets or a column."""
    if isinstance(node, Matrix):
        return _vector(node)
    if isinstance(node, Listed):
        return node.items if (node.opening, node.closing) in (("(", ")"), ("[", "]")) else None
    return node if isinstance(node, Leaf) and has_unit_vectors(node) else None


def _as_range(node: Node, other: Node) -> Node:
    """3-5 where the other side is a range or a closed interval; 3 to 5 as 3:5 where the other side is a ratio."""
    if isinstance(node, Leaf) and isinstance(other, Listed) and (other.opening, other.closing) == ("[", "]"):
        tokens = node.tokens
        if [t.kind for t in tokens] == ["num", "-", "num"] and number(tokens[0].value) < number(tokens[2].value):
            return Listed((Leaf(tokens[:1], node.unit), Leaf(tokens[2:], node.unit)), "[", "]", "to")
    if isinstance(node, Listed) and node.join == "to" and isinstance(other, Leaf):
        low, high = node.items
        if any(t.kind == ":" for t in other.tokens) and isinstance(low, Leaf) and isinstance(high, Leaf):
            return Leaf((*low.tokens, Token(":", ":", 0, 0), *high.tokens))
    return node


def _unwrapped(node: Node) -> Node:
    """A set of one member is that member, and so is a matrix of one entry."""
    while isinstance(node, Listed) and node.opening == "\\{" and len(node.items) == 1:
        node = node.items[0]
    if isinstance(node, Matrix) and len(node.rows) == len(node.rows[0]) == 1:
        return node.rows[0][0]
    return node


def _has_relations(gold: Node, answer: Node) -> bool:
    """Whether exactly one side is a bare list of conditions or intervals, which then describe a set together."""
    lists = [
        isinstance(n, Listed) and not n.opening and all(isinstance(i, Relation) for i in n.items)
        for n in (gold, answer)
    ]
    if lists[0] == lists[1]:
        return False
    conditions = gold if lists[0] else answer
    assert isinstance(conditions, Listed)
    return any(set(item.signs) - {"=", "~"} for item in conditions.items if isinstance(item, Relation))


def _expand(node: Node) -> Node:
    """Plus-minus signs become two values; lists inside bare lists become one list."""
    if isinstance(node, Leaf):
        return _plus_minus(node)
    if isinstance(node, Listed):
        items = [_expand(item) for item in node.items]
        if not node.opening or node.opening == "\\{":
            flat: list[Node] = []
            for item in items:
                flat.extend(item.items if isinstance(item, Listed) and not item.opening else [item])
            return Listed(tuple(flat), node.opening, node.closing, node.join)
        if any(isinstance(item, Listed) and not item.opening for item in items):
            choices = [item.items if isinstance(item, Listed) and not item.opening else (item,) for item in items]
            tuples = list(product(*choices))
            if len(tuples) > MAX_ITEMS:
                raise LimitExceeded("plus-minus signs")
            return Listed(tuple(Listed(t, node.opening, node.closing) for t in tuples))
        return Listed(tuple(items), node.opening, node.closing, node.join)
    if isinstance(node, Relation):
        return Relation(tuple(_expand(side) for side in node.sides), node.signs)
    return node


def _plus_minus(leaf: Leaf) -> Node:
    places = [i for i, t in enumerate(leaf.tokens) if t.kind == "cmd" and t.value in ("pm", "mp")]
    if not places or len(places) > 4:
        return leaf
    paired = any(leaf.tokens[i].value == "mp" for i in places)
    signs = [("+",) * len(places), ("-",) * len(places)] if paired else list(product("+-", repeat=len(places)))
    leaves: list[Node] = []
    for choice in signs:
        tokens = list(leaf.tokens)
        for place, sign in zip(places, choice, strict=True):
            old = tokens[place]
            kind = ("-" if sign == "+" else "+") if old.value == "mp" else sign
            tokens[place] = Token(kind, kind, old.start, old.end)
        leaves.append(Leaf(tuple(tokens), leaf.unit))
    return Listed(tuple(leaves))


def _same_matrix(gold: Node, answer: Node, context: Context) -> bool:
    if isinstance(gold, Matrix) and isinstance(answer, Matrix):
        if [len(row) for row in gold.rows] != [len(row) for row in answer.rows]:
            return False
        return all(
            same(g, a, context)
            for left, right in zip(gold.rows, answer.rows, strict=True)
            for g, a in zip(left, right, strict=True)
        )
    matrix, other = (gold, answer) if isinstance(gold, Matrix) else (answer, gold)
    assert isinstance(matrix, Matrix)
    written = _written_out(other, matrix)
    if written is not None:
        pair = (gold, written) if isinstance(gold, Matrix) else (written, answer)
        return _same_matrix(pair[0], pair[1], context)
    if isinstance(other, Listed):
        vector = _vector(matrix)
        if vector is None or other.opening not in ("(", "[", ""):
            return False
        pairs = (vector, other.items) if isinstance(gold, Matrix) else (other.items, vector)
        return len(vector) == len(other.items) and all(same(g, a, context) for g, a in zip(*pairs, strict=True))
    return context.symbolic(context.gold, context.answer)


def _written_out(node: Node, matrix: Matrix) -> Matrix | None:
    """[[1, 2], [3, 4]] as a matrix, and 6I where the other side is a square matrix."""
    size = len(matrix.rows)
    if isinstance(node, Listed) and all(isinstance(i, Listed) and i.opening == node.opening for i in node.items):
        return Matrix(tuple(parts(item) for item in node.items)) if node.opening in ("[", "(") else None
    if not isinstance(node, Leaf) or any(len(row) != size for row in matrix.rows):
        return None
    place = next((i for i, t in enumerate(node.tokens) if t.value == "I"), -1)
    if place < 0 or text_of(Leaf(node.tokens[place + 1 :])).strip("_{}") not in ("", str(size)):
        return None
    factor = Leaf(node.tokens[:place] or (Token("num", "1", 0, 0),))
    zero = Leaf((Token("num", "0", 0, 0),))
    return Matrix(tuple(tuple(factor if i == j else zero for j in range(size)) for i in range(size)))


def _vector(matrix: Matrix) -> tuple[Node, ...] | None:
    if len(matrix.rows) == 1:
        return matrix.rows[0]
    if all(len(row) == 1 for row in matrix.rows):
        return tuple(row[0] for row in matrix.rows)
    return None


def _same_listed(gold: Node, answer: Node, context: Context) -> bool:
    if isinstance(gold, Leaf) or isinstance(answer, Leaf):
        return _list_against_one(gold, answer, context)
    assert isinstance(gold, Listed) and isinstance(answer, Listed)
    brackets = gold.opening + gold.closing, answer.opening + answer.closing
    loose = {"", "\\{\\}"}
    if brackets[0] in loose and brackets[1] in loose:
        return _same_members(gold, answer, context)
    if len(gold.items) != len(answer.items):
        return False
    if "\\{\\}" in brackets:
        return False
    if len(gold.items) == 2 and brackets[0] != brackets[1] and set(brackets) != {"()", ""}:
        return False
    return _same_ordered(_values(ordered_names(gold.items)), _values(ordered_names(answer.items)), context)


def _list_against_one(gold: Node, answer: Node, context: Context) -> bool:
    for node, other in ((gold, answer), (answer, gold)):
        if isinstance(node, Listed) and len(node.items) == 1:
            pair = (node.items[0], other) if node is gold else (other, node.items[0])
            return same(pair[0], pair[1], context)
    leaf = gold if isinstance(gold, Leaf) else answer
    assert isinstance(leaf, Leaf)
    try:
        read(leaf.tokens)
    except Unreadable:
        return (
            False
            if is_text(leaf.tokens) or any(t.kind == ":" for t in leaf.tokens)
            else context.symbolic(context.gold, context.answer)
        )
    return False


def _same_members(gold: Listed, answer: Listed, context: Context) -> bool:
    """Bare lists and sets: in any order, unless one side names its members and the other does not. Of letters alone,
    p and q is not p or q."""
    left, right = gold.items, answer.items
    if {gold.join, answer.join} == {"and", "or"} and all(
        isinstance(i, Leaf) and len(i.tokens) == 1 and i.tokens[0].kind == "id" for i in (*left, *right)
    ):
        return False
    if _numbered(left):
        left = _values(left)
    if _numbered(right):
        right = _values(right)
    named = [all(isinstance(i, Relation) and i.signs == ("=",) for i in items) for items in (left, right)]
    if named[0] != named[1]:
        names = [
            text_of(i.sides[0]) if isinstance(i, Relation) and isinstance(i.sides[0], Leaf) else ""
            for i in (left if named[0] else right)
        ]
        if len(set(names)) == len(names):
            left, right = _values(ordered_names(left)), _values(ordered_names(right))
            return len(left) == len(right) and _same_ordered(left, right, context)
        left, right = _values(left), _values(right)
    if context.rules.ordered and gold.opening == answer.opening == "":
        return len(left) == len(right) and _same_ordered(left, right, context)
    return _same_unordered(left, right, context) or _repeats(left, right, context)


def _repeats(gold: Sequence[Node], answer: Sequence[Node], context: Context) -> bool:
    """Whether the answer merely repeats members of the gold. A gold that repeats one requires it twice."""
    if not 1 < len(gold) < len(answer) <= _MOST_REPEATS:
        return False
    if any(same(a, b, context) for a, b in combinations(gold, 2)):
        return False
    places = [next((i for i, g in enumerate(gold) if same(g, a, context)), -1) for a in answer]
    return -1 not in places and len(set(places)) == len(gold)


def _numbered(items: Sequence[Node]) -> bool:
    """x_1 = a, x_2 = b: the indices only distinguish the solutions of one unknown."""
    heads = [text_of(i.sides[0]) for i in items if isinstance(i, Relation) and isinstance(i.sides[0], Leaf)]
    plain = [head.replace("{", "").replace("}", "") for head in heads]
    letters = {head[:-2] for head in plain}
    if len(heads) != len(items) or len(letters) != 1 or not letters <= {"x", "y", "z", "t", "lambda"}:
        return False
    return sorted(head[-2:] for head in plain) == [f"_{n}" for n in range(1, len(plain) + 1)]


def _values(items: Sequence[Node]) -> tuple[Node, ...]:
    return tuple(
        value_side(i) if isinstance(i, Relation) and set(i.signs) <= {"=", "~"} and is_name(i.sides[0]) else i
        for i in items
    )


def _same_ordered(left: Sequence[Node], right: Sequence[Node], context: Context) -> bool:
    return len(left) == len(right) and all(same(g, a, context) for g, a in zip(left, right, strict=True))


def _same_unordered(left: Sequence[Node], right: Sequence[Node], context: Context) -> bool:
    if len(left) != len(right):
        return False
    open_answers = list(right)
    for item in left:
        for place, candidate in enumerate(open_answers):
            if same(item, candidate, context):
                del open_answers[place]
                break
        else:
            return False
    return True


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
    left, right = (_parts_of(side, size) for side in (gold, answer))
    if left is None or right is None:
        return False
    return all(same_value(a, b, Fraction(1), context) for a, b in zip(left, right, strict=True))


def _parts_of(side: Leaf | Sequence[Node], size: int) -> list[Tree] | None:
    try:
        if not isinstance(side, Leaf):
            return [read(item.tokens) for item in side if isinstance(item, Leaf)] if len(side) == size else None
        tree = read(side.tokens)
        used = evaluate.symbols(tree) & set(UNIT_VECTORS)
        if size not in (2, 3) or not used <= set(UNIT_VECTORS[:size]) or not _is_linear(tree):
            return None
    except (Unreadable, Undefined):
        return None
    return [_with_units(tree, [int(i == place) for i in range(3)]) for place in range(size)]


def _with_units(tree: Tree, values: Sequence[int]) -> Tree:
    return evaluate.put(tree, dict(zip(UNIT_VECTORS, map(Fraction, values), strict=True)))


def _is_linear(tree: Tree) -> bool:
    """Whether a tree is a sum of multiples of the unit vectors, judged at one point."""
    values = [
        evaluate.numeric(_with_units(tree, place), 0)
        for place in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2, -3, 5))
    ]
    expected = 2 * values[1] - 3 * values[2] + 5 * values[3]
    tiny = evaluate._context().mpf(10) ** -30
    return bool(abs(values[0]) <= tiny and abs(values[4] - expected) <= tiny * (1 + abs(expected)))
