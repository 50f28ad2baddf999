"""The same problem with other numbers: question, working and answer of a row with calculator marks stay consistent.

New numbers are drawn for the question, every result is recomputed, and a draw is kept if everything that held for the
old numbers holds for the new ones. Many draws are tested together in floating point; those that pass are recomputed in
fractions, written out, and checked by parsing their own text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np

from lemma.core.random import stream
from lemma.core.types import Demonstration, Message, Problem
from lemma.data.held_out import ORIGIN
from lemma.data.readers import Item
from lemma.plugins.vary.marks import Exact, holds, quotient, value_of, without_marks
from lemma.plugins.vary.roles import NumberPlace, Plan, Symbol, Template, Unclear, decimals_of, plan_of

DRAWS = (256, 4096, 16384)
"""How many draws are tested together; more if too few pass."""
FEW = 2048
"""With at most this many combinations, all are tested."""
ENOUGH = 10
"""If at least this many values have as many digits as the old one, only those are drawn."""
STEPS = 10_000
"""Maximum number of values that a number may take."""
NEAR = 1e-6
TOO_LONG = re.compile(r"\d(?:,?\d){11}")
"""Numbers that floating point can no longer tell apart."""


def vary(item: Item, count: int, seed: int) -> list[Demonstration]:
    """Up to `count` different problems like this one, with other numbers and their solutions; none if the row has no
    calculator marks, or if it is not certain what each number stands for.

    They depend on the row's content and the seed; a smaller count gives the first ones of a larger count.
    """
    if not isinstance(item, Demonstration) or item.answer is None or item.problem.golds != (item.answer,):
        return []
    problem, working = item.problem, item.reasoning or ""
    if "<<" not in working or len(problem.messages) != 1 or problem.choices or problem.traces:
        return []
    asked = problem.messages[0]
    if TOO_LONG.search(f"{asked.content} {working} {item.answer}"):
        return []
    try:
        plan = plan_of(asked.content, working, item.answer)
    except Unclear:
        return []
    variants: dict[str, Demonstration] = {}
    for values in _draws(plan, seed, asked.content):
        question = written(plan.question, values)
        if question in variants or question == asked.content:
            continue
        new, gold = written(plan.working, values), written(plan.answer, values)
        if not holds(new, gold):
            continue
        varied = replace(
            problem,
            messages=(Message(asked.role, question),),
            golds=(gold,),
            id=f"{problem.id}~{len(variants) + 1}",
            extra={ORIGIN: problem.id},
        )
        variants[question] = replace(item, problem=varied, reasoning=new, answer=gold)
        if len(variants) == count:
            break
    return list(variants.values())


def unmarked(item: Item) -> Item:
    """The item without calculator marks, in its solution and in a teacher's traces."""
    problem = item if isinstance(item, Problem) else item.problem
    problem = replace(problem, traces=tuple(map(without_marks, problem.traces))) if problem.traces else problem
    if isinstance(item, Problem):
        return problem
    texts = {name: getattr(item, name, None) for name in ("reasoning", "response", "chosen", "rejected")}
    changed: dict[str, Any] = {name: without_marks(text) for name, text in texts.items() if text}
    return replace(item, problem=problem, **changed)


def _draws(plan: Plan, seed: int, name: str) -> Iterator[list[Exact]]:
    """Exact values of all symbols, one list per draw that passes."""
    domains = [_domain(symbol) for symbol in plan.symbols[: plan.given]]
    units = [unit for _, unit in domains]
    seen: set[tuple[int, ...]] = set()
    for places in _places([len(steps) for steps, _ in domains], seed, name):
        columns = [steps[place] for (steps, _), place in zip(domains, places, strict=True)]
        for row in _passing(plan, columns, units):
            drawn = tuple(int(column[row]) for column in columns)
            if drawn in seen:
                continue
            seen.add(drawn)
            values = _computed(
                plan,
                [quotient(step * unit.numerator, unit.denominator) for step, unit in zip(drawn, units, strict=True)],
            )
            if values is not None and _fits(plan, values):
                yield values


def _places(sizes: list[int], seed: int, name: str) -> Iterator[list[np.ndarray]]:
    """Indices into domains of these sizes, in batches of draws: all combinations in random order, or ever larger
    batches."""
    room = math.prod(sizes)
    if room < 2:
        return
    if room <= FEW:
        yield list(np.unravel_index(stream(seed, "vary", name).permutation(room), sizes))
        return
    for attempt, size in enumerate(DRAWS):
        random = stream(seed, "vary", name, attempt)
        yield [random.integers(0, one, size) for one in sizes]


def _domain(symbol: Symbol) -> tuple[np.ndarray, Fraction]:
    """The values that a number of the question may take, as whole multiples of a unit."""
    value, places = symbol.value, decimals_of(symbol.value)
    if symbol.fixed:
        return np.array([value.numerator]), Fraction(1, value.denominator)
    unit = _unit(symbol, places)
    low, high = max(value / 2, unit), max(value * 2, value + 2 * unit)
    if places == 0:
        low, high = max(low, Fraction(2)), max(high, value + 2)
    elif value < 1:
        high = min(high, Fraction(1))
    elif value > 1:
        low = max(low, Fraction(1))
    if symbol.cap is not None:
        high = min(high, Fraction(symbol.cap))
    low, high = max(low, value - STEPS // 2 * unit), min(high, value + STEPS // 2 * unit)
    steps = np.arange(-(-low // unit), high // unit + 1, dtype=np.int64)
    if places:
        needed = np.array([decimals_of(unit * int(step)) for step in steps])
        steps = steps[needed == places]
    if symbol.article:
        steps = steps[np.array([_takes_an(unit * int(step)) == _takes_an(value) for step in steps], dtype=bool)]
    digits = 10 ** len(str(value // 1))
    whole = steps * unit.numerator // unit.denominator
    alike = steps[(whole < digits) & ((whole >= digits // 10) | (digits == 10))]
    return (alike if len(alike) >= ENOUGH else steps), unit


def _unit(symbol: Symbol, places: int) -> Fraction:
    """Round numbers stay round: the step between the values that may be drawn."""
    value = symbol.value
    if symbol.percent and places == 0:
        return Fraction(5) if value % 5 == 0 else Fraction(1)
    smallest = Fraction(1, 10**places)
    if places:
        return smallest * 5 if places > 1 and value % (smallest * 5) == 0 else smallest
    step = 1
    while value % (step * 10) == 0 and value >= step * 100:
        step *= 10
    if value >= 20 and value % 5 == 0 and step == 1:
        step = 5 if value >= 100 else 1
    return Fraction(step)


def _takes_an(value: Exact) -> bool:
    """Whether a number takes `an` instead of `a`."""
    text = str(int(value))
    return text[0] == "8" or (text[:2] in ("11", "18") and len(text) % 3 == 2)


def _computed(plan: Plan, given: list[Any]) -> list[Any] | None:
    """The values of all symbols from those of the question."""
    values = list(given)
    for symbol in plan.symbols[plan.given :]:
        value = symbol.value if symbol.tree is None else value_of(symbol.tree, values)
        if value is None:
            return None
        values.append(value)
    return values


def _passing(plan: Plan, columns: list[np.ndarray], units: list[Fraction]) -> list[int]:
    """The draws that pass, in floating point, what `_fits` checks in fractions; in order."""
    rows = np.arange(len(columns[0]))
    values: list[Any] = [column * float(unit) for column, unit in zip(columns, units, strict=True)]
    rows, values = _kept(rows, values, _in_order(plan, values, range(plan.given)))
    with np.errstate(all="ignore"):
        for place, symbol in enumerate(plan.symbols[plan.given :], start=plan.given):
            if not len(rows):
                return []
            if symbol.tree is None:
                values.append(np.full(len(rows), float(symbol.value)))
                continue
            values.append(value_of(symbol.tree, values))
            keep = _allowed(symbol, values[-1])
            for one, other in plan.equal:
                if max(one, other) == place:
                    keep &= np.abs(values[one] - values[other]) < NEAR
            rows, values = _kept(rows, values, keep)
        for one, other in plan.equal:
            rows, values = _kept(rows, values, np.abs(values[one] - values[other]) < NEAR)
        rows, values = _kept(rows, values, _in_order(plan, values, plan.results))
    return rows.tolist()


def _kept(rows: np.ndarray, values: list[Any], keep: Any) -> tuple[np.ndarray, list[Any]]:
    if keep is True or keep.all():
        return rows, values
    return rows[keep], [value[keep] for value in values]


def _allowed(symbol: Symbol, values: np.ndarray) -> np.ndarray:
    """Whether a computed value is of the same kind as before: whole, zero, one, several, below 1, within its limit."""
    old = float(symbol.value)
    scaled = values * 10 ** decimals_of(symbol.value)
    keep = np.abs(scaled - np.round(scaled)) < NEAR
    if old in (0, 1):
        keep &= np.abs(values - old) < NEAR
    elif old < 1:
        keep &= (values > 0) & (values < 1)
    else:
        keep &= values > (2 - NEAR if symbol.value.denominator == 1 else 1)
    if symbol.cap is not None:
        keep &= values <= symbol.cap + NEAR
    return keep


def _in_order(plan: Plan, values: list[Any], places: Any) -> Any:
    """Whether the order of values is unchanged; percentages are compared only with percentages."""
    keep: Any = True
    for percent in (False, True):
        chosen = [place for place in places if plan.symbols[place].percent == percent]
        chosen.sort(key=lambda place: plan.symbols[place].value)
        for low, high in pairwise(chosen):
            if plan.symbols[low].value < plan.symbols[high].value:
                keep = keep & (values[low] < values[high] - NEAR)
    return keep


def _fits(plan: Plan, values: list[Exact]) -> bool:
    """The same in fractions, for one draw, because floating point may be wrong about it."""
    for symbol, value in zip(plan.symbols, values, strict=True):
        if value < 0 or 10 ** decimals_of(symbol.value) % value.denominator:
            return False
    return all(values[one] == values[other] for one, other in plan.equal)


def written(template: Template, values: list[Exact]) -> str:
    """A text with these values filled in."""
    return "".join(piece if isinstance(piece, str) else _number(values[piece.symbol], piece) for piece in template)


def _number(value: Exact, place: NumberPlace) -> str:
    decimals = decimals_of(value) if place.decimals < 0 else place.decimals
    digits, beyond = divmod(value.numerator * 10**decimals, value.denominator)
    assert not beyond, "a value has no more decimals than its place"
    whole, rest = divmod(digits, 10**decimals)
    text = f"{whole:,}" if place.commas else str(whole)
    if decimals:
        text += f".{rest:0{decimals}d}"
    return text.removeprefix("0") if place.bare and decimals else text
