"""The shape of an answer: a list, tuple, set, interval, union, matrix, relation, or a single expression or text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

from lemma.grading.limits import MAX_ITEMS, MAX_NESTING, LimitExceeded
from lemma.grading.tokens import Token, name_set
from lemma.grading.units import Unit, attach_powers, has_words, read_unit, unit_parts

Tokens = tuple[Token, ...]

OPEN = {"(": ")", "[": "]", "{": "}", "\\{": "\\}"}
CLOSE = frozenset(OPEN.values())
RELATIONS = frozenset({"=", "<", ">", "<=", ">=", "!="})
_SEPARATORS = frozenset({",", ";"})
_JOINING = frozenset({"and", "or"})
_HEDGES = name_set("approximately about approx around exactly roughly thus so hence only")
_NAMED = name_set("subset subseteq perp parallel cong iff implies Rightarrow")
_ARROWS = frozenset({"approx", "equiv", "to", "rightarrow", "supset", "supseteq"}) | _NAMED
_TAILS = ("for", "where", "with", "if", "when")


@dataclass(frozen=True, slots=True)
class Leaf:
    """One expression, number or text, with the unit that followed it."""

    tokens: Tokens
    unit: Unit | None = None


@dataclass(frozen=True, slots=True)
class Listed:
    """Several members. `opening` and `closing` are the brackets, both empty for a bare list. `join` is the word between
    the members: and, or, or nothing; "to" if the two are the ends of a range."""

    items: tuple[Node, ...]
    opening: str = ""
    closing: str = ""
    join: str = ""


@dataclass(frozen=True, slots=True)
class Union:
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Minus:
    """A set without the members of another."""

    left: Node
    right: Node


@dataclass(frozen=True, slots=True)
class Matrix:
    rows: tuple[tuple[Node, ...], ...]


@dataclass(frozen=True, slots=True)
class Relation:
    """a = b, a < b < c: the sides in order and the signs between them."""

    sides: tuple[Node, ...]
    signs: tuple[str, ...] = field(default=())


Node = Leaf | Listed | Union | Minus | Matrix | Relation


def text_of(leaf: Leaf) -> str:
    """The tokens of a leaf, without spaces."""
    return "".join(t.value for t in leaf.tokens)


def parts(node: Node) -> tuple[Node, ...]:
    """The nodes directly below one."""
    if isinstance(node, Minus):
        return node.left, node.right
    if isinstance(node, Relation):
        return node.sides
    if isinstance(node, Matrix):
        return tuple(cell for row in node.rows for cell in row)
    return () if isinstance(node, Leaf) else node.items


@lru_cache(maxsize=8192)
def shape(tokens: Tokens, depth: int = 0) -> Node:
    """The shape of a token sequence; total: anything without a shape is a leaf."""
    if depth > MAX_NESTING:
        raise LimitExceeded("nesting")
    tokens = _stripped(tokens)
    parts = _split(tokens)
    if len(parts) > 1:
        return _bare_list(parts, _join_word(tokens), depth)
    names = {t.value if t.kind == "cmd" else t.kind for t in tokens}
    for build, needed in _BUILDERS:
        if needed is None or not names.isdisjoint(needed):
            node = build(tokens, depth)
            if node is not None:
                return node
    return _leaf(tokens)


def _is_word(token: Token, names: frozenset[str] | tuple[str, ...]) -> bool:
    return token.kind in ("word", "text") and token.value.lower().strip(" ,.") in names


def _stripped(tokens: Tokens) -> Tokens:
    """The tokens without leading hedges, a surrounding pair of plain braces, and final punctuation."""
    while tokens and (tokens[-1].kind in (".", ",", ";") or _is_word(tokens[-1], _JOINING)):
        tokens = tokens[:-1]
    while tokens and (
        _is_word(tokens[0], _HEDGES) or (tokens[0].kind == "cmd" and tokens[0].value in ("approx", "therefore"))
    ):
        tokens = tokens[1:]
    while len(tokens) > 1 and _is_word(tokens[0], ("if",)):
        tokens = tokens[1:]
    while (
        len(tokens) > 2
        and tokens[0].kind == "{"
        and _match(tokens, 0) == len(tokens) - 1
        and len(_split(tokens[1:-1])) == 1
    ):
        tokens = tokens[1:-1]
    return tokens


def _match(tokens: Tokens, start: int) -> int:
    """Position of the bracket that closes the one at `start`, whatever its kind; -1 if there is none."""
    depth = 0
    for place in range(start, len(tokens)):
        kind = tokens[place].kind
        if kind in OPEN:
            depth += 1
        elif kind in CLOSE:
            depth -= 1
            if depth == 0:
                return place
    return -1


def _top(tokens: Tokens) -> list[int]:
    """Indices of the tokens outside all brackets and matrix environments."""
    if not any(t.kind in OPEN or t.value == "begin" for t in tokens):
        return list(range(len(tokens)))
    out, depth, environment = [], 0, 0
    for place, token in enumerate(tokens):
        if token.kind in CLOSE and depth:
            depth -= 1
        if token.kind == "cmd" and token.value == "begin":
            environment += 1
        if depth == 0 and environment == 0:
            out.append(place)
        if token.kind == "cmd" and token.value == "end" and environment:
            environment -= 1
        if token.kind in OPEN:
            depth += 1
    return out


def _split(tokens: Tokens, separators: frozenset[str] = _SEPARATORS) -> list[Tokens]:
    """Cut at commas, semicolons, "and", "or" outside brackets; empty pieces are dropped."""
    pieces, start = [], 0
    for place in _top(tokens):
        token = tokens[place]
        if token.kind in separators or (separators is _SEPARATORS and _joins(token)):
            pieces.append(tokens[start:place])
            start = place + 1
    pieces.append(tokens[start:])
    pieces = [piece for piece in pieces if piece]
    if len(pieces) > MAX_ITEMS:
        raise LimitExceeded("members of a list")
    return pieces or [tokens]


def _joins(token: Token) -> bool:
    if token.kind == "cmd":
        return token.value in ("vee", "lor", "wedge", "land")
    if token.kind not in ("word", "text"):
        return False
    value = token.value.lower().strip(" ,.")
    return value in _JOINING or (
        token.kind == "text" and value.split()[-1:] in (["and"], ["or"]) and len(value.split()) < 5
    )


def _join_word(tokens: Tokens) -> str:
    """The word that joins the members of a bare list: "or" if it occurs."""
    said = {t.value.lower().strip(" ,.").split()[-1] for t in tokens if t.kind in ("word", "text") and _joins(t)}
    said |= {t.value for t in tokens if t.kind == "cmd" and _joins(t)}
    return "or" if said & {"or", "vee", "lor"} else "and" if said else ""


def _bare_list(parts: list[Tokens], join: str, depth: int) -> Node:
    nodes = [shape(part, depth + 1) for part in parts]
    first = nodes[0]
    if isinstance(first, Relation) and first.signs == ("=",) and not any(isinstance(n, Relation) for n in nodes[1:]):
        nodes[0] = first.sides[1]
    return Listed(tuple(nodes), join=join)


def _union(tokens: Tokens, depth: int) -> Node | None:
    places = [p for p in _top(tokens) if tokens[p].kind == "cmd" and tokens[p].value == "cup"]
    if not places:
        places = [
            p for p in _top(tokens) if tokens[p].kind == "id" and tokens[p].value == "U" and 0 < p < len(tokens) - 1
            and tokens[p - 1].kind in CLOSE and tokens[p + 1].kind in OPEN
        ]  # fmt: skip
    if not places:
        return None
    edges = [-1, *places, len(tokens)]
    pieces = [tokens[a + 1 : b] for a, b in pairwise(edges)]
    return Union(tuple(shape(piece, depth + 1) for piece in pieces if piece))


def _minus(tokens: Tokens, depth: int) -> Node | None:
    """A set difference: `\\setminus`, or a minus sign between a set and braces."""
    for place in reversed(_top(tokens)):
        token = tokens[place]
        if not 0 < place < len(tokens) - 1:
            continue
        named = token.kind == "cmd" and token.value in ("setminus", "backslash", "smallsetminus")
        if named or (token.kind == "-" and tokens[place - 1].kind in CLOSE and tokens[place + 1].kind == "\\{"):
            return Minus(shape(tokens[:place], depth + 1), shape(tokens[place + 1 :], depth + 1))
    return None


def _range(tokens: Tokens, depth: int) -> Node | None:
    """3 to 5: the numbers from one to the other."""
    for place in _top(tokens):
        if _is_word(tokens[place], ("to",)):
            ends = tokens[:place], tokens[place + 1 :]
            if all(any(t.kind == "num" for t in end) and not any(t.kind == "id" for t in end) for end in ends):
                return Listed(tuple(shape(end, depth + 1) for end in ends), "[", "]", "to")
    return None


def _membership(tokens: Tokens, depth: int) -> Node | None:
    """x in [a, b] is the interval."""
    for place in _top(tokens):
        token = tokens[place]
        if token.kind == "cmd" and token.value == "in" and 0 < place <= 4 and place < len(tokens) - 1:
            return shape(tokens[place + 1 :], depth + 1)
    return None


def _relation(tokens: Tokens, depth: int) -> Node | None:
    places = [p for p in _top(tokens) if tokens[p].kind in RELATIONS]
    approx = [p for p in _top(tokens) if tokens[p].kind == "cmd" and tokens[p].value in _ARROWS]
    if not places and not approx:
        return None
    places = sorted(places + approx)
    edges = [-1, *places, len(tokens)]
    pieces = [tokens[a + 1 : b] for a, b in pairwise(edges)]
    if not all(pieces):
        says_value = places[0] == 0 and (tokens[0].kind == "=" or tokens[0].kind not in RELATIONS)
        kept = tokens[1:] if says_value else ()
        return shape(kept, depth + 1) if kept else None
    signs = tuple(tokens[p].kind if tokens[p].kind in RELATIONS else tokens[p].value for p in places)
    signs = tuple("~" if s == "approx" else "=" if s in ("equiv", "to", "rightarrow") else s for s in signs)
    sides = tuple(shape(piece, depth + 1) for piece in pieces)
    if signs[0].startswith("sup"):
        return Relation(sides[::-1], tuple(sign.replace("sup", "sub") for sign in signs[::-1]))
    return Relation(sides, signs)


def _matrix(tokens: Tokens, depth: int) -> Node | None:
    """A whole text that is one matrix or array environment, perhaps in brackets of its own."""
    tokens = _unbracket(tokens)
    if len(tokens) < 8 or tokens[0].kind != "cmd" or tokens[0].value != "begin" or tokens[-4].value != "end":
        return None
    name = "".join(t.value for t in tokens[2 : _match(tokens, 1)])
    if name not in ("matrix", "pmatrix", "bmatrix", "Bmatrix", "smallmatrix", "array", "cases"):
        return None
    start = _match(tokens, 1) + 1
    if name == "array" and start < len(tokens) and tokens[start].kind == "{":
        start = _match(tokens, start) + 1
    body = tokens[start:-4]
    if any(t.kind == "cmd" and t.value in ("begin", "end") for t in body):
        return None
    rows: list[tuple[Node, ...]] = []
    for line in _split(body, frozenset({"row"})):
        cells = _split(line, frozenset({"&"}))
        rows.append(tuple(shape(cell, depth + 1) for cell in cells))
    if name == "cases":
        return _cases(rows)
    return Matrix(tuple(rows))


def _cases(rows: list[tuple[Node, ...]]) -> Node | None:
    """A system of conditions, all of them true, or values with their conditions; in any order."""
    if all(len(row) == 1 for row in rows):
        return Listed(tuple(row[0] for row in rows), join="and") if len(rows) > 1 else rows[0][0]
    if any(len(row) != 2 for row in rows):
        return None
    return Listed(tuple(Listed(row, "(", ")") for row in rows))


def _unbracket(tokens: Tokens) -> Tokens:
    if len(tokens) > 1 and tokens[0].kind == "\\{" and tokens[1].value == "begin" and _match(tokens, 0) < 0:
        tokens = tokens[1:]
    while len(tokens) > 2 and tokens[0].kind in ("(", "[") and _match(tokens, 0) == len(tokens) - 1:
        if tokens[1].value != "begin":
            break
        tokens = tokens[1:-1]
    return tokens


def _bracketed(tokens: Tokens, depth: int) -> Node | None:
    """A text in one pair of brackets: a tuple, an interval, a set, a set-builder, or just parentheses."""
    if len(tokens) > 2 and tokens[0].kind in ("(", "[") and tokens[-1].kind in ("text",):
        tail = tokens[-1].value.lower().split()
        if tail and tail[0] in _TAILS and _match(tokens, 0) == len(tokens) - 2:
            tokens = tokens[:-1]
    if not tokens or tokens[0].kind not in OPEN or _match(tokens, 0) != len(tokens) - 1:
        return None
    opening, closing, inside = tokens[0].kind, tokens[-1].kind, tokens[1:-1]
    if not inside:
        return None
    if opening in ("\\{", "{"):
        bar = [p for p in _top(inside) if inside[p].kind in ("|", ":")]
        if bar and 0 < bar[0] < len(inside) - 1 and any(t.kind in RELATIONS for t in inside[bar[0] + 1 :]):
            return shape(inside[bar[0] + 1 :], depth + 1)
    parts = _split(inside)
    if len(parts) > 1:
        opening, closing = ("\\{", "\\}") if opening == "{" else (opening, closing)
        return Listed(tuple(shape(part, depth + 1) for part in parts), opening, closing)
    if opening == "\\{":
        return Listed((shape(inside, depth + 1),), opening, closing)
    node = shape(inside, depth + 1)
    return node if not isinstance(node, Leaf) or opening == "(" else None


def _leaf(tokens: Tokens) -> Leaf:
    """Words at the end that name a unit or what is counted become the unit."""
    end, parts = unit_parts(tokens)
    before = tokens[:end]
    if not parts or before[-1].kind in "+-*/^" or all(t.kind in ("text", "word") for t in before) or has_words(before):
        return Leaf(tokens)
    unit = read_unit(attach_powers(parts))
    return Leaf(before, unit) if unit is not None else Leaf(tokens)


def _transposed(tokens: Tokens, depth: int) -> Node | None:
    """The transpose of a matrix; a row and a column of numbers are the same vector."""
    end = len(tokens) - (4 if tokens[-1].kind == "}" else 2)
    if end < 2 or tokens[end].kind != "^" or not {t.value for t in tokens[end + 1 :]} & {"T", "top", "t"}:
        return None
    node = shape(tokens[:end], depth + 1)
    if isinstance(node, Matrix) and len({len(row) for row in node.rows}) == 1:
        return Matrix(tuple(zip(*node.rows, strict=True)))
    return node if isinstance(node, Listed) and node.opening in ("(", "[") else None


_BUILDERS: tuple[tuple[Callable[[Tokens, int], Node | None], frozenset[str] | None], ...] = (
    (_membership, frozenset({"in"})),
    (_range, frozenset({"word", "text"})),
    (_union, frozenset({"cup", "id"})),
    (_minus, frozenset({"setminus", "backslash", "smallsetminus", "\\{"})),
    (_relation, RELATIONS | _ARROWS),
    (_transposed, frozenset({"^"})),
    (_matrix, frozenset({"begin"})),
    (_bracketed, frozenset(OPEN)),
)
