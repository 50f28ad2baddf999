"""Think and answer tags that a system message asks for: the completion writes `<think>` itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from lemma.formats.chat import ChatFormat
from lemma.formats.tags import GradeUnfinished, Parsed, Tags, parse_tagged, unboxed

SYSTEM = (
    "The user asks a question, and you solve it. First think about the reasoning process, then give the user the "
    "answer. Enclose the reasoning in <think> </think> and the answer in <answer> </answer>, that is: "
    "<think> your reasoning </think> <answer> your answer </answer>"
)
TAGS = Tags("<think>", "</think>", "<answer>", "</answer>", opened=False)


class ThinkAnswer(ChatFormat):
    """Chat turns, then `<think> reasoning </think> <answer> answer </answer>`."""

    name: Literal["think_answer"] = "think_answer"
    """Reasoning and answer in `<think>` and `<answer>` tags."""
    grade_unfinished: GradeUnfinished = False

    @property
    def default_system(self) -> str:
        return SYSTEM

    def compose(self, reasoning: str, answer: str) -> str:
        return f"<think> {reasoning} </think> <answer> {answer} </answer>"

    def parse(self, completion: str) -> Parsed:
        parsed = parse_tagged(completion, TAGS, grade_unfinished=self.grade_unfinished)
        if parsed.answer is None:
            return parsed
        answer = unboxed(parsed.answer)
        return replace(parsed, answer=answer or None, faults=parsed.faults if answer else (*parsed.faults, "no_answer"))
