r"""The format of Qwen's math models: a system message asks for the answer in \boxed{}."""

from __future__ import annotations

from typing import Literal

from lemma.formats.base import Parsed
from lemma.formats.boxes import compose_boxed, parse_boxed
from lemma.formats.chat import ChatFormat

INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."


class Boxed(ChatFormat):
    r"""Chat turns, then `reasoning ... \boxed{answer}`."""

    name: Literal["boxed"] = "boxed"
    """boxed."""

    @property
    def default_system(self) -> str:
        return INSTRUCTION

    def compose(self, reasoning: str, answer: str) -> str:
        return compose_boxed(reasoning, answer)

    def parse(self, completion: str) -> Parsed:
        return parse_boxed(completion)
