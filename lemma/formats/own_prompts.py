"""Prompts that rows bring themselves, read as a format's: the instruction at the top and the question."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lemma.core.errors import UserError
from lemma.core.types import Demonstration, Message, Problem
from lemma.formats.encode import prompt_text
from lemma.formats.format import Format

TOP, ASKED = "the-instruction", "the-question"


class OwnPrompts:
    """How a format, with any instruction or none, writes a prompt around a question."""

    def __init__(self, fmt: Format, tokenizer: Any):
        self._fmt, self._tokenizer = fmt, tokenizer
        self._bare = self._written("").partition(ASKED)
        try:
            self._front, _, rest = self._written(TOP).partition(TOP)
        except UserError:  # a chat template that refuses any system message: none of its prompts has one
            self._front = rest = ""
        self._middle, _, self._end = rest.partition(ASKED)

    def _written(self, system: str) -> str:
        fmt = self._fmt.model_copy(update={"system": system})
        return fmt.prompt(Problem((Message("user", ASKED),)), self._tokenizer)

    def read(self, item: Demonstration) -> tuple[str, str] | None:
        """The instruction, perhaps empty, and the question of the row's own prompt; None if the format would not have
        written it."""
        prompt = prompt_text(self._fmt, item, self._tokenizer)
        if self._middle.strip() and prompt.startswith(self._front) and prompt.endswith(self._end):
            inner = prompt[len(self._front) : len(prompt) - len(self._end)]
            system, middle, question = inner.partition(self._middle)
            if middle and system:
                return system, question
        front, _, end = self._bare
        if prompt.startswith(front) and prompt.endswith(end) and len(prompt) >= len(front) + len(end):
            return "", prompt[len(front) : len(prompt) - len(end)]
        return None

    def understood(self, item: Demonstration) -> Demonstration:
        """A row with a prompt of its own, its problem the question alone where the prompt is the format's."""
        found = self.read(item)
        if found is None:
            return item
        return replace(item, problem=replace(item.problem, messages=(Message("user", found[1]),)))
