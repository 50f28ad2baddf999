"""Which rows are held out of training: those whose questions come first in an order that the seed alone gives.

So every stage of a run holds the same questions out of the same rows, and the smaller of two shares lies in the larger.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from lemma.core.random import key
from lemma.core.types import Demonstration, Judged, Preference, Problem, content_id, problem_of

T = TypeVar("T")
ORIGIN = "varied_from"
"""Key in `extra` under which a problem with other numbers keeps the id of its original."""
_VARIED = re.compile(r"~\d+$")
"""How the id of such a problem ends."""


def origin_of(problem_id: str) -> str:
    """The id of the original of a problem with other numbers, from its id alone; any other problem's own id."""
    return _VARIED.sub("", problem_id)


def question_of(problem: Problem) -> str:
    """A name for what is asked, whatever the problem's id, its right answer and its system message."""
    turns = [(message.role, message.content) for message in problem.messages if message.role != "system"]
    return content_id(turns, problem.choices)


def place_of(question: str, seed: int) -> float:
    """Where a question stands in the order of the seed, from 0 to 1."""
    return key(seed, "data", "held out", question) / 2**64


def split_share(
    items: Sequence[T], share: float, seed: int, identity: Callable[[T], str] | None = None
) -> tuple[list[T], list[T]]:
    """What stays and what is held out: about `share` of the items, with at least one on each side if there are two.

    Items with the same question stay together, so repeated rows, or a problem and its variations, never end up on both
    sides; `identity` gives the question of an item of any other type.
    """
    if share <= 0 or len(items) < 2:
        return list(items), []
    groups: dict[str, list[int]] = {}
    for place, question in enumerate(questions_of(items) if identity is None else map(identity, items)):
        groups.setdefault(question, []).append(place)
    if len(groups) < 2:
        groups = {str(place): [place] for place in range(len(items))}
    wanted = max(1, round(share * len(items)))
    held: set[int] = set()
    for question in sorted(groups, key=lambda one: place_of(one, seed))[:-1]:
        if held and len(held) + len(groups[question]) > wanted:
            break
        held.update(groups[question])
    stays = [item for place, item in enumerate(items) if place not in held]
    return stays, [items[place] for place in sorted(held)]


def questions_of(items: Sequence[Any]) -> list[str]:
    """The question of each item; for a variation, that of its original. Items of other types are unique."""
    problems = [
        problem_of(one) if isinstance(one, Problem | Demonstration | Preference | Judged) else None for one in items
    ]
    known = {problem.id: question_of(problem) for problem in problems if problem is not None}
    questions = []
    for place, problem in enumerate(problems):
        origin = None if problem is None else problem.extra.get(ORIGIN)
        own = str(place) if problem is None else known[problem.id]
        questions.append(own if origin is None else known.get(origin, origin))
    return questions
