"""Parsing a completion with tags: reasoning between one pair, the answer between another."""

from __future__ import annotations

from dataclasses import dataclass

from lemma.formats.format import Parsed


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
