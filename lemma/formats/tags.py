r"""What a completion is parsed into, and where reasoning and answer stand in it: between tags, or in a \boxed{...} with
balanced braces. Linear in the text."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from lemma.grading.extract import extract
from lemma.grading.rules import Rules
from lemma.grading.tokens import closing_brace

if TYPE_CHECKING:
    from lemma.formats.format import Format

BOX = re.compile(r"\\boxed\s*\{")

FAULTS: dict[str, str] = {
    "missing_think_start": "the reasoning has no opening tag",
    "missing_think_end": "the reasoning never ends, so no answer counts",
    "several_think_ends": "the reasoning ends more than once; what follows the second end is dropped",
    "text_before_think": "there is text in front of the reasoning",
    "text_before_answer": "there is text between the reasoning and the answer",
    "wrong_space": "not exactly one space between the reasoning and the answer",
    "no_answer": "there is no answer, or it is empty",
    "no_closing_tag": "the answer is never closed, so it does not count",
    "several_answers": "there are several answers; the last one counts",
    "text_after_answer": "there is text after the answer; it is dropped",
}
"""Every fault code that `parse` can return, and its meaning."""

GradeUnfinished = Annotated[
    bool,
    Field(description="If the reasoning never ends, look for an answer in the whole text instead of counting none."),
]

HARMLESS = frozenset({"several_answers", "text_after_answer"})
"""Faults that are worth counting but leave no doubt about which answer was given."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """A parsed completion. `answer` is None if none counts; `faults` are keys of `FAULTS`."""

    reasoning: str | None
    answer: str | None
    faults: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the completion follows the format: there is an answer and every fault is harmless."""
        return self.answer is not None and HARMLESS.issuperset(self.faults)


def read_answer(fmt: Format, completion: str, finish: str, rules: Rules) -> Parsed:
    """A completion as the format parses it. Where the prompt did not ask for a form and the format finds no answer, the
    answer is looked for in the whole completion, unless it was cut off."""
    parsed = fmt.parse(completion)
    if not fmt.asks_by or parsed.faults != ("no_answer",) or finish == "length" or fmt.asks_by in fmt.own_system:
        return parsed
    answer = extract(completion, rules).answer
    return parsed if answer is None else replace(parsed, answer=answer, faults=())


@dataclass(frozen=True, slots=True)
class Tags:
    """`opened`: the prompt already emits `think_start`, so everything up to `think_end` is reasoning."""

    think_start: str
    think_end: str
    answer_start: str
    answer_end: str
    opened: bool


@dataclass(frozen=True, slots=True)
class Thought:
    """A completion split at the end of its reasoning; `rest` is None if no answer can count."""

    reasoning: str | None
    rest: str | None
    faults: tuple[str, ...]


def split_thought(completion: str, start: str, end: str, *, opened: bool, grade_unfinished: bool) -> Thought:
    """Split a completion where its reasoning first ends.

    If it never ends, an answer inside it does not count, unless `grade_unfinished` asks for the whole text.
    """
    faults: list[str] = []
    before, found, body = completion.partition(start)
    if opened:
        body = body if found and not before.strip() else completion
    elif not found:
        faults.append("missing_think_start")
        body = completion
    elif before.strip():
        faults.append("text_before_think")
    thought, ended, rest = body.partition(end)
    if ended:
        return Thought(thought.strip(), rest, tuple(faults))
    faults.append("missing_think_end")
    if opened or found:
        return Thought(body.strip(), body if grade_unfinished else None, tuple(faults))
    return Thought(None, body, tuple(faults))


def last_answer(text: str, start: str, end: str) -> tuple[str | None, list[str]]:
    """The text between the last opening tag and the first closing tag after it, and what is wrong around it."""
    _, found, tail = text.rpartition(start)
    if not found:
        return None, ["no_answer"]
    faults = ["several_answers"] if text.count(start) > 1 else []
    answer, closed, after = tail.partition(end)
    if not closed:
        return None, [*faults, "no_closing_tag"]
    if not answer.strip():
        return None, [*faults, "no_answer"]
    if after.strip():
        faults.append("text_after_answer")
    return answer.strip(), faults


def parse_tagged(completion: str, tags: Tags, *, grade_unfinished: bool = False) -> Parsed:
    """Reasoning, then white space, then an answer in tags; whatever follows is dropped."""
    thought = split_thought(
        completion, tags.think_start, tags.think_end, opened=tags.opened, grade_unfinished=grade_unfinished
    )
    if thought.rest is None:
        return Parsed(thought.reasoning, None, thought.faults)
    answer, faults = last_answer(thought.rest, tags.answer_start, tags.answer_end)
    finished = "missing_think_end" not in thought.faults
    if finished and "no_answer" not in faults and thought.rest.partition(tags.answer_start)[0].strip():
        faults.insert(0, "text_before_answer")
    return Parsed(thought.reasoning, answer, (*thought.faults, *faults))


def unboxed(answer: str) -> str | None:
    """The content of the last box; the answer itself if it has no box; None if the last box never closes."""
    starts = list(BOX.finditer(answer))
    if not starts:
        return answer
    end = closing_brace(answer, starts[-1].end() - 1)
    return None if end < 0 else answer[starts[-1].end() : end].strip()
