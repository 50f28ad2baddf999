"""The built-in endless source: chained arithmetic word problems with worked solutions.

    eva has 13 pens . buys 9 . gives 3 . finds 3 . halves . loses 9 . gets 3 . how many ?

If a question ends in `how ?`, the solution shows every step.

Every token is separated by one space and every number from 0 to 99 is one word, so a word-level tokenizer made from
`VOCABULARY` reads all of it. Problem number i depends only on the seed, the split and i. A hash of its start value and
its operations (not of the words around them) decides which split a problem belongs to, so no problem of one split, nor
a rewording of it, appears in another, whatever the seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from hashlib import blake2b
from typing import Literal, NamedTuple

from lemma.core.errors import UserError, nearest
from lemma.core.random import key, stream
from lemma.core.types import Demonstration, Message, Problem
from lemma.data.data_options import ArithmeticOptions

Style = Literal["stepwise", "terse", "mixed", "skipping"]

NAMES = ("eva", "tom", "mia", "ben", "zoe", "sam", "ana", "leo", "ida", "max", "liv", "kai")
THINGS = ("pens", "coins", "cards", "shells", "stamps", "books", "apples", "marbles", "beads", "stones", "cups", "keys")
VERBS = {
    "+": ("buys", "finds", "gets", "wins"),
    "-": ("gives", "loses", "sells", "drops"),
    "*": ("doubles",),
    "/": ("halves",),
}
SIGN_OF = {verb: sign for sign, verbs in VERBS.items() for verb in verbs}
VOCABULARY: tuple[str, ...] = (
    *(str(number) for number in range(100)),
    *("+", "-", "*", "/", "=", ";", ".", "?", "has", "how", "many"),
    *SIGN_OF,
    *NAMES,
    *THINGS,
)
"""Every word that questions, solutions and answers can contain."""

SMALLEST_START, LARGEST_START = 3, 15
SMALLEST_AMOUNT, LARGEST_AMOUNT = 2, 9
TERSE_SHARE = 0.6
WRITTEN_SHARE = 0.5
SPLIT_OF_HASH = ("train", "train", "train", "train", "test", "test", "validation", "validation")


class Step(NamedTuple):
    """One operation and the running total after it; doubling is `* 2` and halving is `/ 2`."""

    sign: str
    amount: int
    total: int


def generate(options: ArithmeticOptions, split: str, start: int = 0, count: int | None = None) -> list[Demonstration]:
    """Problems number `start` to `start + count` of a split, each with its worked solution."""
    if split not in SPLIT_OF_HASH:
        raise UserError(f"the built-in arithmetic has no split '{split}'", fix=nearest(split, set(SPLIT_OF_HASH)))
    count = options.count if count is None else count
    return [_demonstration(options, split, number) for number in range(start, start + count)]


def split_of(first: int, steps: Sequence[Step]) -> str:
    """The only split that may hold this problem."""
    content = "".join([f"{sign}{amount}" for sign, amount, _ in steps])
    return SPLIT_OF_HASH[blake2b(f"{first}{content}".encode(), digest_size=1).digest()[0] % len(SPLIT_OF_HASH)]


def parse(question: str) -> tuple[int, list[Step]]:
    """The start value and the operations of a question from this source."""
    opening, *middle, _ = question.split(" . ")
    first = total = int(opening.split(" ")[2])
    steps = []
    for part in middle:
        verb, *amount = part.split(" ")
        steps.append(_step(total, SIGN_OF[verb], int(amount[0]) if amount else 2))
        total = steps[-1].total
    return first, steps


def solution(problem: Problem, style: Style) -> str:
    """The worked solution of a problem. Chains are read from left to right: `13 + 9 / 2 = 11`.

    Random choices (which style of `mixed`, which running totals `skipping` leaves out) are a function of the problem's
    id alone.
    """
    first, steps = parse(problem.question)
    return _solution(first, steps, style, problem.id, WRITTEN_SHARE)


def mistaken(item: Demonstration) -> Demonstration:
    """The same worked solution with a slip in its last step; how large it is depends on the problem's id alone."""
    assert item.reasoning is not None and item.answer is not None
    right = int(item.answer)
    slip = 1 + key(0, "arithmetic", "slip", item.problem.id) % 9
    wrong = str(right - slip if right >= slip else right + slip)
    return replace(item, reasoning=item.reasoning.removesuffix(item.answer) + wrong, answer=wrong)


def _solution(first: int, steps: Sequence[Step], style: Style, name: str, share: float) -> str:
    if style == "mixed":
        style = "terse" if key(0, "arithmetic", "style", name) % 1000 < 1000 * TERSE_SHARE else "stepwise"
    if style == "skipping":
        written = (stream(0, "arithmetic", "written", name).random(len(steps)) < share).tolist()
    else:
        written = [style == "stepwise"] * len(steps)
    parts = [str(first)]
    for (sign, amount, total), is_written in zip(steps[:-1], written, strict=False):
        parts.append(f"{sign} {amount} = {total} ; {total}" if is_written else f"{sign} {amount}")
    sign, amount, total = steps[-1]
    parts.append(f"{sign} {amount} = {total}")
    return " ".join(parts)


def _demonstration(options: ArithmeticOptions, split: str, number: int) -> Demonstration:
    moves = _moves(options.largest)
    draws_per_attempt = 3 + 3 * options.operations
    generator = stream(options.seed, "arithmetic", split, number)
    while True:
        draws = generator.random(draws_per_attempt).tolist()
        first, steps = _walk(moves, options.operations, draws)
        if split_of(first, steps) == split:
            break
    answer = str(steps[-1].total)
    name = f"arithmetic/{split}/{options.seed}/{options.operations}x{options.largest}/{number}"
    is_asked_how = key(0, "arithmetic", "how", name) % 1000 < 1000 * options.asked_how
    style: Style = "stepwise" if is_asked_how else options.style
    question = _question(first, steps, draws) + (" how ?" if is_asked_how else "")
    problem = Problem(
        messages=(Message("user", question),),
        golds=(answer,),
        id=f"{name}/how" if is_asked_how else name,
        source="arithmetic",
        level=str(options.operations),
    )
    return Demonstration(problem, reasoning=_solution(first, steps, style, name, options.written), answer=answer)


def _step(total: int, sign: str, amount: int) -> Step:
    after = {"+": total + amount, "-": total - amount, "*": total * 2, "/": total // 2}[sign]
    return Step(sign, amount, after)


@lru_cache(maxsize=128)
def _moves(largest: int) -> list[list[list[Step]]]:
    """For every running total, the steps that keep the next one within 0 to `largest`, in lists by sign.

    The lists for plus and minus appear three times and the others twice: drawing a list and then a step from it doubles
    or halves in about two steps out of five.
    """
    moves = []
    for total in range(largest + 1):
        amounts = range(SMALLEST_AMOUNT, LARGEST_AMOUNT + 1)
        plus = [_step(total, "+", amount) for amount in amounts if total + amount <= largest]
        minus = [_step(total, "-", amount) for amount in amounts if total - amount >= 0]
        double = [_step(total, "*", 2)] if 0 < total * 2 <= largest else []
        halve = [_step(total, "/", 2)] if total > 0 and total % 2 == 0 else []
        moves.append([steps for steps in [plus, minus] * 3 + [double, halve] * 2 if steps])
    return moves


def _walk(moves: list[list[list[Step]]], operations: int, draws: list[float]) -> tuple[int, list[Step]]:
    """A start value and operations; uses the first 1 + 2 * operations draws."""
    high = min(LARGEST_START, len(moves) - 1)
    first = total = SMALLEST_START + int(draws[0] * (high - SMALLEST_START + 1))
    steps = []
    for place in range(1, 1 + 2 * operations, 2):
        by_sign = moves[total]
        choices = by_sign[int(draws[place] * len(by_sign))]
        step = choices[int(draws[place + 1] * len(choices))]
        steps.append(step)
        total = step.total
    return first, steps


def _question(first: int, steps: Sequence[Step], draws: list[float]) -> str:
    """The text of a problem; uses the last 2 + operations draws."""
    told = []
    for step, chance in zip(steps, draws[-len(steps) :], strict=True):
        verbs = VERBS[step.sign]
        verb = verbs[int(chance * len(verbs))]
        told.append(f"{verb} {step.amount} ." if step.sign in "+-" else f"{verb} .")
    person = NAMES[int(draws[-len(steps) - 1] * len(NAMES))]
    thing = THINGS[int(draws[-len(steps) - 2] * len(THINGS))]
    return f"{person} has {first} {thing} . {' '.join(told)} how many ?"
