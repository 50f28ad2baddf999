r"""LUFFY's own format: long reasoning that ends in </think>, then a short solution with \boxed{}."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from lemma.formats.boxes import compose_boxed, parse_boxed
from lemma.formats.format import Format
from lemma.formats.tags import GradeUnfinished, Parsed, split_thought
from lemma.formats.templates import chatml

SYSTEM = r"""Work on the question in two sections, Thought and Solution.
In the Thought section, explore the question at length: take it apart, recall what is known, try ideas, check every step, go back when one fails, and refine. Write this section as
<think>
 {thoughts} </think>
In the Solution section, use what the Thought section found to give a clear and complete solution, and put the final answer within \boxed{}."""  # noqa: E501


class ThinkBoxed(Format):
    r"""Chat turns that end in `<think>`, then `reasoning </think> solution with \boxed{answer}`."""

    name: Literal["think_boxed"] = "think_boxed"
    """Reasoning, then a boxed answer."""
    grade_unfinished: GradeUnfinished = False

    @property
    def default_system(self) -> str:
        return SYSTEM

    @property
    def opening(self) -> str:
        return "<think>\n"

    @property
    def chat_template(self) -> str:
        return chatml(self.own_system, self.bos, generation=self.opening)

    def compose(self, reasoning: str, answer: str) -> str:
        return f"{reasoning}\n</think>\n\n{compose_boxed('', answer)}"

    def parse(self, completion: str) -> Parsed:
        return parse_thought_and_box(completion, grade_unfinished=self.grade_unfinished)


def parse_thought_and_box(completion: str, *, grade_unfinished: bool = False) -> Parsed:
    """Reasoning opened by the prompt or by the completion itself; then the last box after its end."""
    thought = split_thought(completion, "<think>", "</think>", opened=True, grade_unfinished=grade_unfinished)
    if thought.rest is None:
        return Parsed(thought.reasoning, None, thought.faults)
    solution, again, _ = thought.rest.partition("</think>")
    faults = (*thought.faults, "several_think_ends") if again else thought.faults
    parsed = parse_boxed(solution)
    return replace(parsed, reasoning=thought.reasoning, faults=(*faults, *parsed.faults))
