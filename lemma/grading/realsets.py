"""Sets of real numbers with known end points: unions, intersections and differences of intervals in one canonical
form;
inequalities in one letter are solved if they are linear, quadratic, or absolute values of linear forms."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple

from lemma.grading import evaluate
from lemma.grading.evaluate import Undefined
from lemma.grading.expression import Tree, Unreadable, read
from lemma.grading.limits import GoldLimit, LimitExceeded
from lemma.grading.precision import digits_for, weigh
from lemma.grading.structure import Leaf, Listed, Minus, Node, Relation, Union, parts

_SOLVED = ("<", ">", "<=", ">=", "!=")
FLIP = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "!=": "!=", "=": "=", "~": "~"}


class Piece(NamedTuple):
    """An interval; a single number is closed at both ends."""

    low: Any
    high: Any
    low_in: bool
    high_in: bool


Pieces = list[Piece]


class NotASet(Exception):
    """The node does not describe a set of numbers with known end points."""


def pieces(node: Node) -> Pieces:
    """The canonical pieces of a set, in order and disjoint. Raises NotASet."""
    if isinstance(node, Union):
        return _merge([piece for item in node.items for piece in pieces(item)])
    if isinstance(node, Minus):
        return _without(pieces(node.left), pieces(node.right))
    if isinstance(node, Relation):
        return _relation(node)
    if isinstance(node, Leaf):
        if is_reals(node):
            return _everything()
        raise NotASet
    if isinstance(node, Listed):
        return _listed(node)
    raise NotASet


def same_set(gold: Node, answer: Node) -> bool:
    """Whether two nodes describe the same set. Raises NotASet."""
    try:
        tall, cost = _weigh(gold)
    except LimitExceeded as error:
        raise GoldLimit from error
    more, costs = _weigh(answer)
    with digits_for(tall + more, cost + costs) as close:
        left, right = pieces(gold), pieces(answer)
        return len(left) == len(right) and all(
            a.low_in == b.low_in and a.high_in == b.high_in and close(a.low, b.low) and close(a.high, b.high)
            for a, b in zip(left, right, strict=True)
        )


def _weigh(node: Node) -> tuple[float, int]:
    """The height of all the numbers in a node together, and what they cost."""
    if isinstance(node, Leaf):
        try:
            return weigh(read(node.tokens))
        except Unreadable:
            return 0.0, 0
    weights = [_weigh(part) for part in parts(node)]
    return sum(tall for tall, _ in weights), sum(cost for _, cost in weights)


def is_reals(leaf: Leaf) -> bool:
    """Whether a leaf names all real numbers."""
    text = "".join(t.value for t in leaf.tokens).replace(" ", "").lower()
    return text in ("mathbb{r}", "allrealnumbers", "allreals", "realnumbers", "allrealnumber", "thesetofallrealnumbers")


def _everything() -> Pieces:
    infinity = evaluate._context().inf
    return [Piece(-infinity, infinity, False, False)]


def _number(node: Node) -> Any:
    if not isinstance(node, Leaf):
        raise NotASet
    try:
        tree = read(node.tokens)
        if evaluate.symbols(tree):
            raise NotASet
        value = evaluate.numeric(tree, 0)
    except (Unreadable, Undefined) as error:
        raise NotASet from error
    if isinstance(value, evaluate._context().mpc):
        raise NotASet
    return value


def _listed(node: Listed) -> Pieces:
    if node.opening == "\\{":
        numbers = [_number(item) for item in node.items]
        return _merge([Piece(n, n, True, True) for n in numbers])
    if not node.opening:
        return _several(node)
    if len(node.items) != 2:
        raise NotASet
    low, high = (_number(item) for item in node.items)
    if low > high:
        raise NotASet
    return [Piece(low, high, node.opening == "[", node.closing == "]")]


def _several(node: Listed) -> Pieces:
    """A bare list of conditions: their intersection, unless "or" joins them, or no "and" does and they exclude each
    other."""
    parts = [pieces(item) for item in node.items]
    if node.join != "or" and all(isinstance(item, Relation) for item in node.items):
        met = _everything()
        for part in parts:
            met = _meet(met, part)
        if met or node.join == "and":
            return met
    return _merge([piece for part in parts for piece in part])


def _relation(relation: Relation) -> Pieces:
    """x < a, a < x <= b, x != a, x = a in one letter."""
    met = _everything()
    for place, sign in enumerate(relation.signs):
        left, right = relation.sides[place], relation.sides[place + 1]
        if is_variable(right):
            left, right, sign = right, left, FLIP.get(sign, sign)
        if sign in _SOLVED and not (is_variable(left) and _is_constant(right)):
            met = _meet(met, _solved(left, sign, right))
            continue
        if not is_variable(left) or sign not in ("=", *_SOLVED):
            raise NotASet
        bound, infinity = _number(right), evaluate._context().inf
        if sign == "=":
            met = _meet(met, [Piece(bound, bound, True, True)])
        elif sign == "!=":
            met = _without(met, [Piece(bound, bound, True, True)])
        elif sign in ("<", "<="):
            met = _meet(met, [Piece(-infinity, bound, False, sign == "<=")])
        else:
            met = _meet(met, [Piece(bound, infinity, sign == ">=", False)])
    return met


def _is_constant(node: Node) -> bool:
    try:
        return isinstance(node, Leaf) and not evaluate.symbols(read(node.tokens))
    except Unreadable:
        return True


def _solved(left: Node, sign: str, right: Node) -> Pieces:
    """The numbers for which an inequality in one letter holds."""
    letter = letter_of((left, right))
    if not letter or not isinstance(left, Leaf) or not isinstance(right, Leaf):
        raise NotASet
    trees = read(left.tokens), read(right.tokens)
    try:
        ends = boundaries(*trees, letter)
        if ends is None:
            raise NotASet
        infinity = evaluate._context().inf
        edges = [-infinity, *ends, infinity]
        between = [0] if not ends else [ends[0] - 1, *((a + b) / 2 for a, b in pairwise(ends)), ends[-1] + 1]
        found = [
            Piece(low, high, False, False)
            for (low, high), x in zip(pairwise(edges), between, strict=True)
            if holds(trees[0], sign, trees[1], letter, x)
        ]
    except Undefined as error:
        raise NotASet from error
    return _merge(found + ([Piece(end, end, True, True) for end in ends] if sign in ("<=", ">=") else []))


def is_variable(node: Node) -> bool:
    """Whether a side is a letter, perhaps with an index, or a function of one."""
    tokens = node.tokens if isinstance(node, Leaf) else ()
    if not tokens or tokens[0].kind not in ("id", "cmd") or tokens[0].value in ("infty", "pi", "frac", "sqrt", "e"):
        return False
    if len(tokens) == 1 or tokens[1].kind in ("_", "'"):
        return True
    return tokens[1].kind == "(" and tokens[-1].kind == ")" and len(tokens) <= 4


def _meet(left: Pieces, right: Pieces) -> Pieces:
    out = []
    for a in left:
        for b in right:
            low, high = max(a.low, b.low), min(a.high, b.high)
            low_in = (a.low < low or a.low_in) and (b.low < low or b.low_in)
            high_in = (a.high > high or a.high_in) and (b.high > high or b.high_in)
            if low < high or (low == high and low_in and high_in):
                out.append(Piece(low, high, low_in, high_in))
    return _merge(out)


def _without(left: Pieces, right: Pieces) -> Pieces:
    for b in right:
        infinity = evaluate._context().inf
        below = Piece(-infinity, b.low, False, not b.low_in)
        above = Piece(b.high, infinity, not b.high_in, False)
        left = _meet(left, [below]) + _meet(left, [above])
    return _merge(left)


def _merge(unsorted: Pieces) -> Pieces:
    out: Pieces = []
    for piece in sorted(unsorted, key=lambda p: (p.low, not p.low_in)):
        last = out[-1] if out else None
        if last is not None and (piece.low < last.high or (piece.low == last.high and (piece.low_in or last.high_in))):
            high = max(last.high, piece.high)
            closed = (last.high == high and last.high_in) or (piece.high == high and piece.high_in)
            out[-1] = Piece(last.low, high, last.low_in, closed)
        else:
            out.append(piece)
    return out


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
    value = evaluate.numeric(evaluate.put(tree, {letter: Fraction(x)}), 0)
    if isinstance(value, evaluate._context().mpc):
        raise Undefined
    return value


def holds(left: Tree, sign: str, right: Tree, letter: str, x: Any) -> bool:
    """Whether the inequality holds at a number that is not one of its boundaries, or very near to it."""
    near = Fraction(int(x * 2**64), 2**64)
    difference = _at(left, letter, near) - _at(right, letter, near)
    return bool(difference < 0) if sign in ("<", "<=") else bool(difference > 0) if sign in (">", ">=") else True
