"""Whether two shapes are the same answer. The gold decides what is asked: it and the answer are not interchangeable."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from fractions import Fraction
from itertools import product

from lemma.grading import evaluate
from lemma.grading.evaluate import NotRational, Undefined
from lemma.grading.expression import GREEK, Tree, Unreadable, read
from lemma.grading.leaves import Context, is_text, same_leaf
from lemma.grading.limits import MAX_ITEMS, LimitExceeded
from lemma.grading.realsets import NotASet, is_reals, pieces, same_pieces
from lemma.grading.structure import Leaf, Listed, Matrix, Minus, Node, Relation, Tokens, Union, shape
from lemma.grading.tokens import Token

_FLIP = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "!=": "!=", "=": "=", "~": "~"}
_INFINITY = Token("cmd", "infty", 0, 0)
_MINUS = Token("-", "-", 0, 0)
POSITIVE_INFINITY, NEGATIVE_INFINITY = Leaf((_INFINITY,)), Leaf((_MINUS, _INFINITY))


def same(gold: Node, answer: Node, context: Context) -> bool:
    """Whether the answer is the gold, part by part."""
    gold, answer = _unwrapped(_expand(gold)), _unwrapped(_expand(answer))
    if isinstance(gold, Relation) and isinstance(answer, Relation):
        return _same_relation(gold, answer, context)
    if isinstance(answer, Relation):
        return _against_value(gold, answer, context)
    if isinstance(gold, Relation):
        return _value_against(gold, answer, context)
    if isinstance(gold, Leaf) and isinstance(answer, Leaf):
        return (is_reals(gold) and is_reals(answer)) or same_leaf(gold, answer, context)
    if isinstance(gold, Union | Minus) or isinstance(answer, Union | Minus) or _has_relations(gold, answer):
        with suppress(NotASet):
            return same_pieces(pieces(gold), pieces(answer))
    gold, answer = _as_union(gold, answer), _as_union(answer, gold)
    if isinstance(gold, Minus) or isinstance(answer, Minus):
        return context.symbolic(context.gold, context.answer)
    if isinstance(gold, Union) or isinstance(answer, Union):
        left = gold.items if isinstance(gold, Union) else (gold,)
        right = answer.items if isinstance(answer, Union) else (answer,)
        return _same_unordered(left, right, context)
    if isinstance(gold, Matrix) or isinstance(answer, Matrix):
        return _same_matrix(gold, answer, context)
    return _same_listed(gold, answer, context)


def _unwrapped(node: Node) -> Node:
    """A set of one member is that member."""
    while isinstance(node, Listed) and node.opening == "\\{" and len(node.items) == 1:
        node = node.items[0]
    return node


def _has_relations(gold: Node, answer: Node) -> bool:
    """Whether exactly one side is a bare list of inequalities, which then describe a set together."""
    lists = [
        isinstance(n, Listed) and not n.opening and all(isinstance(i, Relation) for i in n.items)
        for n in (gold, answer)
    ]
    return lists[0] != lists[1]


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
        return Listed(tuple(items), node.opening, node.closing)
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


# Equations and inequalities


def _against_value(gold: Node, answer: Relation, context: Context) -> bool:
    """The answer is a relation and the gold is not: take its value, or the interval it describes."""
    if isinstance(gold, Listed | Union | Minus):
        interval = as_interval(answer)
        if interval is not None:
            return same(gold, interval, context)
    if isinstance(gold, Leaf) and is_reals(gold):
        return False
    if set(answer.signs) <= {"=", "~"}:
        return same(gold, _value_side(answer), context)
    return False


def _value_against(gold: Relation, answer: Node, context: Context) -> bool:
    if set(gold.signs) <= {"=", "~"}:
        if "~" in gold.signs and not _is_name(gold.sides[0]):
            return any(same(side, answer, context) for side in (gold.sides[0], gold.sides[-1]))
        return _is_name(gold.sides[0]) and same(gold.sides[-1], answer, context)
    interval = as_interval(gold)
    return interval is not None and not isinstance(answer, Leaf) and same(interval, answer, context)


def _value_side(relation: Relation) -> Node:
    """The last side of a chain of equations; of an approximation, the exact side in front of it."""
    if "~" in relation.signs:
        place = relation.signs.index("~")
        if place > 0 or not _is_name(relation.sides[0]):
            return relation.sides[place]
    return relation.sides[-1]


def _is_name(node: Node) -> bool:
    """A side that only names what follows: a letter, f(x), a word, a tuple of letters; no numbers outside arguments."""
    if isinstance(node, Listed):
        return all(_is_name(item) for item in node.items)
    if not isinstance(node, Leaf) or not node.tokens:
        return False
    first = node.tokens[0]
    if len(node.tokens) > 2 and (first.kind == "id" or first.value in GREEK) and node.tokens[1].kind in ("(", "_", "'"):
        return True
    return is_text(node.tokens) or not any(t.kind == "num" for t in node.tokens)


def as_interval(relation: Relation) -> Node | None:
    """The set of numbers that an inequality in one letter describes."""
    sides, signs = relation.sides, relation.signs
    if "=" in signs or "~" in signs or len(sides) > 3 or not all(isinstance(s, Leaf) for s in sides):
        return None
    letters = [i for i, side in enumerate(sides) if isinstance(side, Leaf) and _is_letter(side)]
    if len(letters) != 1:
        return None
    if len(sides) == 2:
        place = letters[0]
        sign = signs[0] if place == 0 else _FLIP[signs[0]]
        bound = sides[1 - place]
        if sign == "!=":
            return Union((_interval(NEGATIVE_INFINITY, bound, "(", ")"), _interval(bound, POSITIVE_INFINITY, "(", ")")))
        if sign in ("<", "<="):
            return _interval(NEGATIVE_INFINITY, bound, "(", "]" if sign == "<=" else ")")
        return _interval(bound, POSITIVE_INFINITY, "[" if sign == ">=" else "(", ")")
    if letters != [1]:
        return None
    low, high = sides[0], sides[2]
    first, second = signs
    if first in (">", ">=") and second in (">", ">="):
        low, high, first, second = high, low, _FLIP[second], _FLIP[first]
    if first not in ("<", "<=") or second not in ("<", "<="):
        return None
    return _interval(low, high, "[" if first == "<=" else "(", "]" if second == "<=" else ")")


def _interval(low: Node, high: Node, opening: str, closing: str) -> Listed:
    return Listed((low, high), opening, closing)


def _is_letter(leaf: Leaf) -> bool:
    """A variable, perhaps with an index, or a function of one."""
    tokens = leaf.tokens
    if not tokens or tokens[0].kind not in ("id", "cmd") or tokens[0].value in ("infty", "pi", "frac", "sqrt", "e"):
        return False
    return (
        len(tokens) == 1
        or tokens[1].kind in ("_", "'")
        or (tokens[1].kind == "(" and tokens[-1].kind == ")" and len(tokens) <= 4)
    )


def _same_relation(gold: Relation, answer: Relation, context: Context) -> bool:
    if set(gold.signs) <= {"=", "~"} and set(answer.signs) <= {"=", "~"}:
        return _same_equation(gold, answer, context)
    if len(gold.signs) != len(answer.signs):
        left, right = as_interval(gold), as_interval(answer)
        return left is not None and right is not None and same(left, right, context)
    for sides, signs in (
        (answer.sides, answer.signs),
        (answer.sides[::-1], tuple(_FLIP[s] for s in answer.signs[::-1])),
    ):
        if gold.signs == signs and all(same(g, a, context) for g, a in zip(gold.sides, sides, strict=True)):
            return True
    if len(gold.signs) == 1:
        return _proportional(gold, answer, context)
    left, right = as_interval(gold), as_interval(answer)
    return left is not None and right is not None and _letter(gold) == _letter(answer) and same(left, right, context)


def _letter(relation: Relation) -> str:
    return next("".join(t.value for t in s.tokens) for s in relation.sides if isinstance(s, Leaf) and _is_letter(s))


def _same_equation(gold: Relation, answer: Relation, context: Context) -> bool:
    first, other = gold.sides[0], answer.sides[0]
    if isinstance(first, Leaf) and isinstance(other, Leaf):
        if is_text(first.tokens) or is_text(other.tokens) or _text(first) == _text(other):
            if same(_value_side(gold), _value_side(answer), context):
                return True
        elif _renamed(first, other) is not None:
            old, new = _renamed(first, other) or ("", "")
            side = _rename(_value_side(answer), new, old)
            return same(_value_side(gold), side, context)
    elif same(first, other, context) and same(gold.sides[-1], answer.sides[-1], context):
        return True
    if len(gold.sides) == 2 and len(answer.sides) == 2:
        return _proportional(gold, answer, context)
    if _is_name(first) and _is_name(other) and isinstance(first, Leaf) and isinstance(other, Leaf):
        return _text(first) == _text(other) and same(gold.sides[-1], answer.sides[-1], context)
    return all(same(g, a, context) for g, a in zip(gold.sides, answer.sides, strict=False)) and len(gold.sides) == len(
        answer.sides
    )


def _text(leaf: Leaf) -> str:
    return "".join(t.value for t in leaf.tokens)


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
    """a = b and c = d are one where a - b is a constant multiple of c - d; of an inequality, a positive one."""
    sign = answer.signs[0]
    if gold.signs[0] != sign and gold.signs[0] != _FLIP[sign]:
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
    constant: Fraction | None = None
    ratios = []
    for index in range(4):
        ratios.append(_ratio(left, right, index))
    known = [r for r in ratios if r is not None]
    if not known:
        return False
    constant = known[0]
    if not constant or not all(evaluate.close(r, constant, 30) for r in known):
        return False
    if sign in ("=", "!=", "~"):
        return True
    return bool(constant > 0) == (gold.signs[0] == sign)


def _ratio(left: Tree, right: Tree, index: int) -> Fraction | None:
    try:
        try:
            top, bottom = evaluate.exact(left, index), evaluate.exact(right, index)
            mp = evaluate._context()
            top, bottom = mp.mpf(top.numerator) / top.denominator, mp.mpf(bottom.numerator) / bottom.denominator
        except NotRational:
            top, bottom = evaluate.numeric(left, index), evaluate.numeric(right, index)
    except Undefined:
        return None
    return top / bottom if bottom else None


# Lists, sets, unions, matrices


def _as_union(node: Node, other: Node) -> Node:
    """A list of inequalities is a union of intervals where the other side is one; so is "all real numbers"."""
    if isinstance(node, Listed) and not node.opening and all(isinstance(item, Relation) for item in node.items):
        intervals = [as_interval(item) for item in node.items if isinstance(item, Relation)]
        is_set = isinstance(other, Union) or (isinstance(other, Listed) and other.opening != "")
        if is_set and all(interval is not None for interval in intervals):
            return Union(tuple(i for i in intervals if i is not None))
    if isinstance(node, Leaf) and is_reals(node):
        return _interval(NEGATIVE_INFINITY, POSITIVE_INFINITY, "(", ")")
    return node


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
    if isinstance(other, Listed):
        vector = _vector(matrix)
        if vector is None or other.opening not in ("(", "[", ""):
            return False
        pairs = (vector, other.items) if isinstance(gold, Matrix) else (other.items, vector)
        return len(vector) == len(other.items) and all(same(g, a, context) for g, a in zip(*pairs, strict=True))
    return context.symbolic(context.gold, context.answer)


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
    return _same_ordered(_values(gold.items), _values(answer.items), context)


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
    """Bare lists and sets: in any order, except where one side names its members and the other does not."""
    left, right = gold.items, answer.items
    if _numbered(left):
        left = _values(left)
    if _numbered(right):
        right = _values(right)
    named = [all(isinstance(i, Relation) and i.signs == ("=",) for i in items) for items in (left, right)]
    if named[0] != named[1]:
        names = [
            _text(i.sides[0]) if isinstance(i, Relation) and isinstance(i.sides[0], Leaf) else ""
            for i in (left if named[0] else right)
        ]
        if len(set(names)) == len(names):
            return len(left) == len(right) and _same_ordered(_values(left), _values(right), context)
        left, right = _values(left), _values(right)
    if context.rules.ordered and gold.opening == answer.opening == "":
        return len(left) == len(right) and _same_ordered(left, right, context)
    return _same_unordered(left, right, context)


def _numbered(items: Sequence[Node]) -> bool:
    """x_1 = a, x_2 = b: the numbers only tell the solutions of one unknown apart."""
    heads = [_text(i.sides[0]) for i in items if isinstance(i, Relation) and isinstance(i.sides[0], Leaf)]
    plain = [head.replace("{", "").replace("}", "") for head in heads]
    letters = {head[:-2] for head in plain}
    if len(heads) != len(items) or len(letters) != 1 or not letters <= {"x", "y", "z", "t", "lambda"}:
        return False
    return sorted(head[-2:] for head in plain) == [f"_{n}" for n in range(1, len(plain) + 1)]


def _values(items: Sequence[Node]) -> tuple[Node, ...]:
    return tuple(
        _value_side(i) if isinstance(i, Relation) and set(i.signs) <= {"=", "~"} and _is_name(i.sides[0]) else i
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


def shape_of(tokens: Tokens) -> Node:
    return shape(tokens)
