"""What each number of a worked problem stands for: a given of the question, a result of the working, or a constant.

A `Plan` ties every number of question and working to a symbol. If a number could be either of two symbols, the plan
requires both to stay equal; if it could be neither, the row is `Unclear` and is not varied.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal

from lemma.plugins.vary.marks import (
    Exact,
    Number,
    Sum,
    Tree,
    Working,
    last_result,
    numbers_in,
    quotient,
    value_of,
    working_of,
)
from lemma.plugins.vary.quantities import constants, counted, shares, unit_constants

ORDINAL = re.compile(r"(?:st|nd|rd|th)\b")
SUFFIX = re.compile(r"(?:k?g|mg|[ckm]?m|oz|m?[lL]|lbs?|mph|kph|ft|in|hrs?|mins?|[GMT]B|gb|k[wW]h|[CF])\b")
TIMES = re.compile(r"x(?=\s*[\d$(])")
CLOCK = re.compile(r"\s*(?:[ap]\.m\b|[ap]m\b|[AP]M\b|o.?clock|:\d\d)")
SCALED = re.compile(
    r"[\s-]+(?:hundreds?|thousands?|millions?|billions?|trillions?)\b|\s+and\s+(?:a|one)[\s-]|\s+\d+/\d|\^|²"
)
MONTH = re.compile(r"(?:January|February|March|April|May|June|July|August|September|October|November|December) $")
LISTED = re.compile(r"(?:^|\n)\s*(?:[Ss]tep\s*)?\d+[.):]\s")
ARTICLE = re.compile(r"\b[Aa]n? \$?$")
NOTE = re.compile(r"[- ](?:dollar[- ])?bills?\b|[- ]cent (?:coin|piece|stamp)")
MEASURES = (
    ("inch", "inches", "foot", "feet", "yard", "mile", "centimeter", "cm", "meter", "kilometer", "km", "millimeter"),
    ("gram", "kilogram", "kg", "ounce", "pound", "ton", "lb"),
    ("cup", "pint", "quart", "gallon", "ounce", "liter", "milliliter", "ml", "tablespoon", "teaspoon"),
    ("second", "minute", "hour", "day", "week", "month", "year"),
    ("cent", "dollar", "penny", "pennies", "nickel", "dime", "quarter"),
)
CONVERSION = re.compile(
    "|".join(
        rf"[\s-]*(?:{'|'.join(kind)})s?\s+(?:in|equals?|is|are|per|to|for)\s+(?:an?|one|1|each|every|the)?\s*(?:{'|'.join(kind)})s?\b"
        for kind in MEASURES[:3] + MEASURES[4:]
    )
    + rf"|[\s-]*(?:{'|'.join(MEASURES[3])})s?\s+in\s+(?:an?|one|1|each|every|the)\s*(?:{'|'.join(MEASURES[3])})\b"
)
CONVERTED = re.compile(
    "|".join(
        rf"\b(?:{'|'.join(kind)})s?\s+(?:is|are|equals?|equal to|=|has|have)\s+(?:about |equal to )?$"
        for kind in MEASURES
    )
)
UNIT = re.compile(r"[\s-]*(?:more |other |full )?([a-z]+)")
CAPS = {
    "day": (7, "week"),
    "hour": (24, "day"),
    "minute": (60, "hour"),
    "second": (60, "minute"),
    "month": (12, "year"),
    "week": (52, "year"),
    "year": (99, " old"),
    "cent": (99, ""),
    "inches": (12, "feet"),
}
"""Largest value of a number if the text also mentions the other word."""
SMALL = 12
"""The largest number accepted as an unstated count of things that the text names, such as three people."""

Role = Literal["plain", "percent", "fixed"]


class Unclear(Exception):
    """It is not certain what a number of this row stands for; the message says why."""


@dataclass(slots=True)
class Symbol:
    """A quantity of a row. `tree` computes it from the symbols before it; a number of the question has none."""

    value: Exact
    tree: Tree | None = None
    fixed: bool = False
    percent: bool = False
    at: int = -1
    line: int = -1
    cap: int | None = None
    article: bool = False
    """Whether `a` or `an` stands before it."""


@dataclass(frozen=True, slots=True)
class NumberPlace:
    """Where a symbol is written, and how."""

    symbol: int
    decimals: int
    """Number of decimals to write, if more than the value needs; -1 for as many as it needs."""
    commas: bool
    bare: bool
    """Whether a number below 1 is written without its zero."""


Template = list[str | NumberPlace]


@dataclass(slots=True)
class Plan:
    symbols: list[Symbol] = field(default_factory=list)
    given: int = 0
    """How many of the symbols are givens of the question; they come first."""
    results: list[int] = field(default_factory=list)
    equal: set[tuple[int, int]] = field(default_factory=set)
    question: Template = field(default_factory=list)
    working: Template = field(default_factory=list)
    answer: Template = field(default_factory=list)


def plan_of(question: str, working: str, answer: str) -> Plan:
    """The plan of a row, or Unclear."""
    taken, answers = working_of(working), numbers_in(answer)
    if taken is None or not taken.marks:
        raise Unclear("marks")
    if len(answers) != 1 or last_result(taken).value != answers[0].value:
        raise Unclear("answer")
    return _Planner(question, taken, answer, answers[0]).plan


class _Planner:
    """Builds the plan of one row, starting with the question."""

    def __init__(self, question: str, working: Working, answer: str, gold: Number) -> None:
        self.plan = Plan()
        self.text = working
        self.both = f"{question}\n{working.text}".lower()
        self.constants = constants(question) | unit_constants(working.text) | {Fraction(1)}
        self.fixed: dict[Exact, int] = {}
        self.used: set[int] = set()
        self.commas = bool(re.search(r"\d,\d{3}", question + working.text))
        self._read_question(question)
        self.reachable = self._reachable(question)
        if LISTED.search(working.text):
            raise Unclear("list")
        self._read_sums()
        self._read_prose()
        self.plan.answer = self._filled(answer, [(gold, self.plan.results[-1])], False)
        self._keep_words(working.text)
        self._all_used()
        for one, other in self.plan.equal:
            for this, that in ((one, other), (other, one)):
                if this < self.plan.given and that in self.fixed.values():
                    self.plan.symbols[this].fixed = True

    def _all_used(self) -> None:
        """Refuse a number of the question that no sum uses: it might constrain the others."""
        used = self.used | {n for place in self.used for n in _leaves(self.plan.symbols[place].tree)}
        if any(not self.plan.symbols[place].fixed and place not in used for place in range(self.plan.given)):
            raise Unclear("unused")

    def _read_question(self, text: str) -> None:
        numbers = numbers_in(text)
        roles = [role_of(text, number) for number in numbers]
        for part, whole in re.findall(r"(?<![\d.])(\d+)\s?/\s?(\d+)", text):
            self.constants |= shares(int(part), int(whole))
        places: dict[Exact, int] = {}
        filled = []
        for number, role in zip(numbers, roles, strict=True):
            if number.value not in places:
                places[number.value] = self._add(Symbol(number.value))
            place = places[number.value]
            symbol = self.plan.symbols[place]
            symbol.fixed |= role == "fixed" or number.value in (0, 1)
            symbol.percent |= role == "percent"
            self._note(text, number, symbol)
            filled.append((number, place))
        self.plan.given = len(self.plan.symbols)
        self.plan.question = self._filled(text, filled, True)
        hundred = self._constant(Fraction(100))
        for place in range(self.plan.given):
            if self.plan.symbols[place].percent:
                rest: Tree = ("-", hundred, place)
                more: Tree = ("+", hundred, place)
                for tree in (("%", place), rest, ("%", rest), more, ("%", more)):
                    self._add_computed(tree, at=-1, line=-1)

    def _note(self, text: str, number: Number, symbol: Symbol) -> None:
        """Record what the words around a number require of it."""
        symbol.article |= ARTICLE.search(text[max(0, number.start - 4) : number.start]) is not None
        unit = UNIT.match(text, number.end)
        caps = []
        if unit is not None:
            cap, mentioned = CAPS.get(unit[1], CAPS.get(unit[1].removesuffix("s"), (None, "")))
            caps += [cap] if cap is not None and mentioned in self.both else []
        if text[number.end : number.end + 1] == "%" or text[number.end :].startswith(" percent"):
            caps.append(100)
        for cap in caps:
            if number.value <= cap:
                symbol.cap = cap if symbol.cap is None else min(cap, symbol.cap)

    def _read_sums(self) -> None:
        """Every mark, and every sum in the prose without a mark, becomes a result, in order."""
        marked = {mark.start for mark in self.text.marks}
        steps = [(mark.start, mark) for mark in self.text.marks]
        steps += [(one.result.start, one) for one in self.text.sums if one.result.start not in marked]
        for at, one in sorted(steps, key=lambda step: step[0]):
            tree = self._bound(one, at)
            result = self._add_computed(tree, at, self._line(at))
            if self.plan.symbols[result].value != one.result.value:
                raise Unclear("marks")
            self.plan.results.append(result)

    def _bound(self, one: Sum, at: int) -> Tree:
        places = [self._tie(number.value, at, None) for number in one.numbers]
        self.used.update(places)

        def bind(tree: Tree) -> Tree:
            return places[tree] if isinstance(tree, int) else (tree[0], *map(bind, tree[1:]))

        return bind(one.tree)

    def _read_prose(self) -> None:
        text = self.text.text
        by_place = {self.plan.symbols[place].at: place for place in self.plan.results}
        operands = {number.start for one in self.text.sums for number in one.numbers}
        filled: list[tuple[Number, int]] = []
        for number in numbers_in(text):
            role = role_of(text, number, in_working=True)
            place = by_place.get(number.start)
            if place is not None and self.plan.symbols[place].value != number.value:
                raise Unclear("prose")
            if place is None and role == "fixed":
                self._pin(number.value)
                place = self._constant(number.value)
            elif place is None:
                line = None if number.start in operands else self._line(number.start)
                place = self._tie(number.value, number.start, line)
            self._note(text, number, self.plan.symbols[place])
            filled.append((number, place))
        pieces = self._filled(text, filled, True)
        self.plan.working = self._with_marks(pieces, filled)

    def _with_marks(self, pieces: Template, filled: list[tuple[Number, int]]) -> Template:
        """The prose with its marks put back in front of their results."""
        inside = {}
        for mark, content in zip(self.text.marks, self.text.inside, strict=True):
            result = next(p for p in self.plan.results if self.plan.symbols[p].at == mark.start)
            places = [self._tie(number.value, mark.start, None) for number in mark.numbers]
            holes = [*zip(mark.numbers, places, strict=True), (mark.result, result)]
            inside[mark.start] = ["<<", *self._filled(content, holes, False), ">>"]
        done: Template = []
        for number, piece in zip([None, *(n for n, _ in filled for _ in (0, 1))], pieces, strict=True):
            if isinstance(piece, NumberPlace) and number is not None:
                done += inside.pop(number.start, [])
            done.append(piece)
        if inside:
            raise Unclear("marks")
        return done

    def _filled(self, text: str, holes: Iterable[tuple[Number, int]], prose: bool) -> Template:
        """The text with a slot for each number: text, slot, text, slot, ..., text."""
        pieces: Template = []
        at = 0
        for number, symbol in holes:
            exact = number.decimals > decimals_of(number.value)
            exact |= prose and number.decimals == 2 and text[number.start - 1 : number.start] == "$"
            commas = number.commas if number.value >= 1000 else prose and self.commas
            bare = text[number.start] == "."
            pieces += [text[at : number.start], NumberPlace(symbol, number.decimals if exact else -1, commas, bare)]
            at = number.end
        return [*pieces, text[at:]]

    def _tie(self, value: Exact, at: int, line: int | None) -> int:
        """The symbol that a number stands for; if several are possible, one of them, and all must stay equal.

        In prose, a number may also stand for a result that is computed later in the same line.
        """
        symbols = [
            place
            for place, symbol in enumerate(self.plan.symbols)
            if symbol.value == value
            and place not in self.fixed.values()
            and (symbol.at < at or (line is not None and symbol.line == line))
        ]
        is_count = value.denominator == 1 and 1 <= value <= SMALL and value not in self.reachable
        if value in self.constants or (not symbols and is_count):
            symbols.append(self._constant(value))
        if not symbols:
            raise Unclear("unknown number")
        self.plan.equal.update((symbols[0], other) for other in symbols[1:])
        return symbols[0]

    def _reachable(self, question: str) -> set[Exact]:
        """Values that can be derived from the question without being written down."""
        given = [symbol.value for symbol in self.plan.symbols[: self.plan.given]]
        others: list[Exact] = [*given, *counted(question), 1, 2]
        values: set[Exact] = {0}
        for one in given:
            for other in others:
                values |= {one + other, max(one, other) - min(one, other), one * other}
                values |= {quotient(one, other) if other else one, quotient(other, one) if one else other}
        return values

    def _keep_words(self, working: str) -> None:
        """A number that the working spells out in words keeps its value."""
        for value in counted(working) - {Fraction(1)}:
            self._pin(value)

    def _pin(self, value: Exact) -> None:
        for place in (*range(self.plan.given), *self.plan.results):
            if self.plan.symbols[place].value == value:
                self.plan.equal.add((place, self._constant(value)))

    def _constant(self, value: Exact) -> int:
        if value not in self.fixed:
            self.fixed[value] = self._add(Symbol(value, fixed=True))
        return self.fixed[value]

    def _add_computed(self, tree: Tree, at: int, line: int) -> int:
        value = value_of(tree, [symbol.value for symbol in self.plan.symbols])
        return self._add(Symbol(value, tree, at=at, line=line))

    def _add(self, symbol: Symbol) -> int:
        self.plan.symbols.append(symbol)
        return len(self.plan.symbols) - 1

    def _line(self, at: int) -> int:
        return self.text.text.count("\n", 0, at)


def _leaves(tree: Tree | None) -> set[int]:
    if tree is None:
        return set()
    return {tree} if isinstance(tree, int) else {leaf for one in tree[1:] for leaf in _leaves(one)}


def decimals_of(value: Exact) -> int:
    """How many decimals a value needs; at most 12, for one that never ends."""
    if value.denominator == 1:
        return 0
    decimals, power = 0, 1
    while power % value.denominator and decimals < 12:
        decimals, power = decimals + 1, power * 10
    return decimals


def role_of(text: str, number: Number, in_working: bool = False) -> Role:
    """How a number is used in the text; Unclear if it is not a plain amount."""
    before, after = text[max(0, number.start - 40) : number.start], text[number.end : number.end + 24]
    last = before[-1:]
    if last.isalpha() or last in {"#", "_", "^", "."} or CLOCK.match(after) or SCALED.match(after):
        raise Unclear("notation")
    if after[:1].isalpha():
        if ORDINAL.match(after):
            return "fixed"
        if not SUFFIX.match(after) and not (in_working and TIMES.match(after)):
            raise Unclear("notation")
    if not in_working:
        if re.search(r"(?:^|\s)[-−–]\$?$", before) or re.match(r"\s?[-–]\s?\$?\d", after):
            raise Unclear("notation")
        if re.match(r"\s?/\s?\d", after) or re.search(r"\d\s?/\s?$", before):
            return "fixed"
        if re.match(r"\s?:\s?\d", after) or re.search(r"\d\s?:\s?$", before):
            return "fixed"
        year = 1900 <= number.value <= 2100 and not number.commas and number.decimals == 0 and last != "$"
        note = NOTE.match(after) or re.search(r"\bbills? of \$?$", before[-14:])
        if year or note or MONTH.search(before[-12:]):
            return "fixed"
        if CONVERSION.match(text, number.end) or CONVERTED.search(before[-40:]):
            return "fixed"
    return "percent" if re.match(r"\s?(?:%|percent)", after) else "plain"
