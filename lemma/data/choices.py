"""Multiple choice: how rows give the options and the right one, and how a prompt lists the options."""

from __future__ import annotations

import re
import string
from dataclasses import replace
from typing import TypeVar, cast

from lemma.core.random import permutation
from lemma.core.types import Demonstration, Judged, Message, Preference, Problem
from lemma.data.rows import RowError, Values, has, listed, optional_text, table, text, written

ASK_FOR_LETTER = "Give the letter of the right option as the final answer."
LETTERS = string.ascii_uppercase

T = TypeVar("T", bound=Problem | Demonstration | Preference | Judged)


def multiple_choice(values: Values) -> Problem:
    """`question`, `choices` (or `options`, or columns A to D), and the right one by letter, label or index."""
    choices, letter = options_of(values)
    return Problem(
        (Message("user", text(values, "question", "problem")),),
        (letter,),
        id=optional_text(values, "id", "question_id") or "",
        subject=optional_text(values, "subject", "category"),
        choices=choices,
    )


def gpqa(values: Values) -> Problem:
    """GPQA's own columns; its right answer always comes first, so the choices are shuffled."""
    names = ["Correct Answer", *(f"Incorrect Answer {number}" for number in (1, 2, 3))]
    question = text(values, "Question")
    order = permutation(len(names), 0, "gpqa", question).tolist()
    return Problem(
        (Message("user", question),),
        (LETTERS[order.index(0)],),
        subject=optional_text(values, "Subdomain"),
        choices=tuple(text(values, names[place]).strip() for place in order),
    )


def hellaswag(values: Values) -> Problem:
    """HellaSwag's own columns: a beginning and the endings to choose from, without the markup left over from its web
    pages."""
    begun = f"{text(values, 'ctx_a')} {(optional_text(values, 'ctx_b') or '').capitalize()}"
    activity = optional_text(values, "activity_label")
    endings = tuple(_without_marks(written(one)) for one in listed(values, "endings"))
    letter = LETTERS[_right(values, [str(place) for place in range(len(endings))])]
    asked = _without_marks(f"{activity}: {begun}" if activity else begun)
    return Problem((Message("user", asked),), (letter,), subject=activity, choices=endings)


def _without_marks(words: str) -> str:
    """Plain text: `[title]` ends a sentence, and other tags in brackets are dropped."""
    words = re.sub(r"\[.*?\]", "", words.strip().replace(" [title]", ". "))
    return words.replace("  ", " ")


def options_of(values: Values) -> tuple[tuple[str, ...], str]:
    """The texts of a row's choices, and the letter of the right one."""
    choices, labels = _choices(values)
    if len(labels) != len(choices):
        raise RowError(f"there are {len(choices)} choices but {len(labels)} labels")
    return tuple(choices), LETTERS[_right(values, labels)]


def _choices(values: Values) -> tuple[list[str], list[str]]:
    """The texts of the choices, and the labels that the row gives them."""
    if has(values, "A", "B"):
        labels = [letter for letter in LETTERS if values.get(letter) is not None]
        return [written(values[letter]) for letter in labels], labels
    name = "choices" if has(values, "choices") else "options"
    inner = table(values, name) if isinstance(values.get(name), dict) else None
    texts = [written(one) for one in (listed(values, name) if inner is None else listed(inner, "text"))]
    if len(texts) > len(LETTERS):
        raise RowError(f"there are {len(texts)} choices but only {len(LETTERS)} letters")
    if inner is not None:
        return texts, [written(one) for one in listed(inner, "label")]
    labels = listed(values, "labels") if values.get("labels") else list(LETTERS[: len(texts)])
    return texts, [written(one) for one in labels]


def _right(values: Values, labels: list[str]) -> int:
    """Which choice is right. Labels come first: if they are numbers, a number is one of them and not an index."""
    for name in ("answer", "answerKey", "answer_index", "label"):
        value = values.get(name)
        if value is None or isinstance(value, bool):
            continue
        if written(value).strip() in labels:
            return labels.index(written(value).strip())
        if isinstance(value, int | float) and 0 <= value < len(labels):
            return int(value)
    raise RowError(f"no answer among the labels {', '.join(labels)}")


def shown(problem: Problem, name: str) -> Problem:
    """The problem as it is asked: its options in a random order, under letters, with the gold letter changed to match.

    The order depends on the name and on the problem's id only.
    """
    if not problem.choices:
        return problem
    order = permutation(len(problem.choices), 0, "benchmark", name, "options", problem.id).tolist()
    return _written_out(problem, order)


def as_asked(item: T) -> T:
    """A training item, with the options of its problem in the question.

    The order of a bare problem is drawn under the name of its source, which is the benchmark's name if it belongs to
    one. An item with a response keeps the row's order, because the response refers to its letters.
    """
    if isinstance(item, Problem):
        return cast(T, shown(item, item.source))
    return replace(item, problem=_written_out(item.problem, list(range(len(item.problem.choices)))))


def _written_out(problem: Problem, order: list[int]) -> Problem:
    if not problem.choices:
        return problem
    choices = tuple(problem.choices[place] for place in order)
    golds = tuple(LETTERS[order.index(LETTERS.index(gold))] for gold in problem.golds)
    lines = "\n".join(f"{letter}) {choice}" for letter, choice in zip(LETTERS, choices, strict=False))
    asked = f"{problem.question}\n\n{lines}\n\n{ASK_FOR_LETTER}"
    last = max(place for place, message in enumerate(problem.messages) if message.role == "user")
    messages = (*problem.messages[:last], Message("user", asked), *problem.messages[last + 1 :])
    return replace(problem, messages=messages, choices=choices, golds=golds)
