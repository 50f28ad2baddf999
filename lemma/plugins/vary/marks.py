"""Calculator marks, `48/2 = <<48/2=24>>24`, and the sums in the prose around them: parsed and checked exactly.

A small parser reads expressions, never Python's own, and all arithmetic is in fractions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple

MARK = re.compile(r"<<([-+*/().,%$=\d\s×÷−–]*=[-+*/().,%$\d\s×÷−–]*)>>")
NUMBER = re.compile(r"(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)(?:\.\d+)?|\.\d+")
TOKEN = re.compile(rf"\s*(?:({NUMBER.pattern})|([-+*/()%]))")
SPELLINGS = str.maketrans({"×": "*", "÷": "/", "−": "-", "–": "-", "x": "*", "X": "*", "$": " ", "[": "(", "]": ")"})
EQUATION = re.compile(r"(?<![\w.,$])[\d.,$%()+\-*/x×÷−– ]*=[\d.,$%()+\-*/x×÷−–= ]*(?![\w])")
ALONE = re.compile(rf"[ $]*({NUMBER.pattern})[ .,$(–-]*")
DEEPEST, LONGEST = 20, 60
"""Maximum nesting depth, and maximum count of numbers in one expression; anything larger is not parsed."""

Exact = int | Fraction
"""An exact number: whole numbers are plain ints, which are ten times as fast."""
Tree = int | tuple[Any, ...]
"""An expression: the index of a number in a list, or an operator and its operands. `%` has one operand."""


class Number(NamedTuple):
    """A number as it is written in a text."""

    start: int
    end: int
    value: Exact
    decimals: int
    commas: bool

    def moved(self, by: int) -> Number:
        return Number(self.start + by, self.end + by, self.value, self.decimals, self.commas)


class Sum(NamedTuple):
    """A calculation in a text and its result: a mark, or `expression = number` in the prose."""

    start: int
    numbers: tuple[Number, ...]
    tree: Tree
    result: Number

    def holds(self) -> bool:
        return value_of(self.tree, [number.value for number in self.numbers]) == self.result.value


class Working(NamedTuple):
    """A text without its marks, the marks with their positions, and the sums written in the prose."""

    text: str
    marks: tuple[Sum, ...]
    inside: tuple[str, ...]
    """The content of each mark. Positions of its numbers are within the mark; its start is a position in the text."""
    sums: tuple[Sum, ...]


def without_marks(text: str) -> str:
    """The text without calculator marks. If no number follows a mark, its result replaces it."""
    if "<<" not in text:
        return text

    def shown(match: re.Match[str]) -> str:
        after = text[match.end() :].lstrip(" $-")
        return "" if NUMBER.match(after) else match[1].rpartition("=")[2].strip()

    return re.sub(r"(?<= )\0 +|\0", "", MARK.sub(lambda match: shown(match) or "\0", text))


def quotient(over: Exact, under: Exact) -> Exact:
    if isinstance(over, int) and isinstance(under, int) and under and over % under == 0:
        return over // under
    fraction = Fraction(over, under)
    return fraction.numerator if fraction.denominator == 1 else fraction


def numbers_in(text: str) -> list[Number]:
    return [_number(match) for match in NUMBER.finditer(text)]


def _number(match: re.Match[str], group: int = 0) -> Number:
    text = match[group]
    if text.isdecimal():
        return Number(match.start(group), match.end(group), int(text), 0, False)
    decimals = len(text.partition(".")[2])
    plain = text.replace(",", "")
    value = quotient(int(plain.replace(".", "")), 10**decimals) if decimals else int(plain)
    return Number(match.start(group), match.end(group), value, decimals, "," in text)


class _Parser:
    """Sums, products, signs, brackets and percents; anything else is a ValueError."""

    def __init__(self, text: str) -> None:
        self.numbers: list[Number] = []
        self.tokens: list[int | str] = []
        self.place = 0
        text, at = text.translate(SPELLINGS).rstrip(), 0
        while at < len(text):
            match = TOKEN.match(text, at)
            if match is None:
                raise ValueError(text)
            if match[1] is not None:
                self.tokens.append(len(self.numbers))
                self.numbers.append(_number(match, 1))
            else:
                self.tokens.append(match[2])
            at = match.end()
        if len(self.numbers) > LONGEST:
            raise ValueError("too long")

    def whole(self) -> Tree:
        tree = self.sum(0)
        if self.place < len(self.tokens):
            raise ValueError("something follows")
        return tree

    def take(self, wanted: str) -> str | None:
        token = self.tokens[self.place] if self.place < len(self.tokens) else None
        if not isinstance(token, str) or token not in wanted:
            return None
        self.place += 1
        return token

    def sum(self, depth: int) -> Tree:
        if depth > DEEPEST:
            raise ValueError("too deep")
        left = self.product(depth)
        while (sign := self.take("+-")) is not None:
            left = (sign, left, self.product(depth))
        return left

    def product(self, depth: int) -> Tree:
        left = self.factor(depth)
        while (sign := self.take("*/")) is not None:
            left = (sign, left, self.factor(depth))
        return left

    def factor(self, depth: int) -> Tree:
        if self.take("("):
            tree = self.sum(depth + 1)
            if not self.take(")"):
                raise ValueError("an open bracket")
        else:
            token = self.tokens[self.place] if self.place < len(self.tokens) else None
            if not isinstance(token, int):
                raise ValueError("a number is missing")
            self.place += 1
            tree = token
        while self.take("%"):
            tree = ("%", tree)
        return tree


def parsed(text: str) -> tuple[Tree, list[Number]] | None:
    """An expression and its numbers, with their positions in the text; None if the text is not an expression."""
    try:
        parser = _Parser(text)
        return parser.whole(), parser.numbers
    except ValueError:
        return None


def value_of(tree: Tree, values: Sequence[Any]) -> Any:
    """The value of an expression for these numbers, fractions or arrays of floats; None if it divides by zero."""
    try:
        return _value_of(tree, values)
    except ZeroDivisionError:
        return None


def _value_of(tree: Tree, values: Sequence[Any]) -> Any:
    if isinstance(tree, int):
        return values[tree]
    operator, *operands = tree
    left = _value_of(operands[0], values)
    if operator == "%":
        return _divided(left, 100)
    right = _value_of(operands[1], values)
    if operator == "+":
        return left + right
    if operator == "-":
        return left - right
    return left * right if operator == "*" else _divided(left, right)


def _divided(left: Any, right: Any) -> Any:
    return quotient(left, right) if isinstance(left, Exact) and isinstance(right, Exact) else left / right


def working_of(text: str) -> Working | None:
    """The working in a text; None if a mark or a sum in the prose cannot be parsed, or is wrong."""
    flat: list[str] = []
    marks: list[Sum] = []
    inside: list[str] = []
    at = length = 0
    for match in MARK.finditer(text):
        flat.append(text[at : match.start()])
        length += match.start() - at
        at = match.end()
        mark = _sum(match[1], length)
        if mark is None or not mark.holds():
            return None
        marks.append(mark)
        inside.append(match[1])
    flat.append(text[at:])
    bare = "".join(flat)
    if "<<" in bare or ">>" in bare:
        return None
    sums = tuple(_prose_sums(bare))
    return Working(bare, tuple(marks), tuple(inside), sums) if all(one.holds() for one in sums) else None


def _sum(text: str, start: int) -> Sum | None:
    """A sum from `expression=number`."""
    left, _, right = text.rpartition("=")
    expression, results = parsed(left), numbers_in(right)
    if "=" in left or expression is None or len(results) != 1 or right.strip(" $%") != _text(right, results[0]):
        return None
    tree, numbers = expression
    return Sum(start, tuple(numbers), tree, results[0].moved(len(left) + 1))


def _text(text: str, number: Number) -> str:
    return text[number.start : number.end]


def _prose_sums(text: str) -> Iterator[Sum]:
    """Sums written in figures only, such as `3 x 4 = 12`; of `2 x 3 + 1 = 6 + 1 = 7`, the last one.

    An expression that begins with a sign is the rest of one with words in it, and is skipped.
    """
    for match in EQUATION.finditer(text):
        at = match.start()
        sides: list[tuple[int, str]] = []
        for side in match[0].split("="):
            sides.append((at, side))
            at += len(side) + 1
        for (left_at, left), (right_at, right) in pairwise(sides):
            result = ALONE.fullmatch(right)
            expression = parsed(left.rstrip(" $")) if result is not None else None
            if result is None or expression is None or isinstance(expression[0], int):
                continue
            tree, numbers = expression
            yield Sum(left_at, tuple(one.moved(left_at) for one in numbers), tree, _number(result, 1).moved(right_at))


def holds(working: str, answer: str) -> bool:
    """Whether every mark and every sum in the prose is right, and the last mark gives the answer."""
    steps, answers = working_of(working), numbers_in(answer)
    if steps is None or not steps.marks or len(answers) != 1:
        return False
    return last_result(steps).value == answers[0].value


def last_result(working: Working) -> Number:
    """The result of the last mark or sum."""
    last = working.marks[-1]
    later = [one for one in working.sums if one.result.start > last.start]
    return later[-1].result if later else last.result
