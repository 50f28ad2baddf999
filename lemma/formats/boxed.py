r"""The format of Qwen's math models: a system message asks for the answer in \boxed{}."""

from __future__ import annotations

from typing import ClassVar, Literal

from lemma.formats.boxes import compose_boxed, parse_boxed
from lemma.formats.chat import ChatFormat
from lemma.formats.tags import GradeUnfinished, Parsed
from lemma.formats.think_boxed import parse_thought_and_box

INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."


def parse_perhaps_thinking(completion: str, *, grade_unfinished: bool = False) -> Parsed:
    """The last box; if a completion opens or closes `<think>`, the last one after the reasoning."""
    if completion.lstrip().startswith("<think>") or "</think>" in completion:
        return parse_thought_and_box(completion, grade_unfinished=grade_unfinished)
    return parse_boxed(completion)


class BoxedChat(ChatFormat):
    r"""Chat turns, then `reasoning ... \boxed{answer}`, for models with and without think tags."""

    thinking: bool = False
    """The chat template itself ends in `<think>`, so every completion begins with its reasoning."""
    grade_unfinished: GradeUnfinished = False

    def compose(self, reasoning: str, answer: str) -> str:
        if self.thinking:
            return f"{reasoning}\n</think>\n\n{compose_boxed('', answer)}"
        return compose_boxed(reasoning, answer)

    def parse(self, completion: str) -> Parsed:
        parse = parse_thought_and_box if self.thinking else parse_perhaps_thinking
        return parse(completion, grade_unfinished=self.grade_unfinished)


class Boxed(BoxedChat):
    r"""Chat turns under an instruction to reason step by step, then `reasoning ... \boxed{answer}`."""

    name: Literal["boxed"] = "boxed"
    """A boxed answer."""

    @property
    def default_system(self) -> str:
        return INSTRUCTION


class Chat(BoxedChat):
    r"""The tokenizer's chat template, with no instruction added, then `reasoning ... \boxed{answer}`."""

    name: Literal["chat"] = "chat"
    """The tokenizer's chat template and nothing else."""

    asks_by: ClassVar[str] = "boxed"
