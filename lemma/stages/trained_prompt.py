"""The prompt that a stage trains with, for evaluating its model: rows may have their own system message, or a whole
prompt of their own.

Either replaces the format's instruction in training. Benchmark problems have none, and would be asked under an
instruction that the model never saw.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any

from lemma.core.errors import UserError
from lemma.core.files import write_whole
from lemma.core.types import Demonstration, Message, Problem
from lemma.formats.encode import prompt_text
from lemma.formats.format import PROMPT_FILE, Format, trained_system
from lemma.runs.stage import Stage

Systems = Counter[str | None]
"""How often rows are asked under each instruction; None is the format's."""
OTHER = "\0"
"""Stands for a prompt of a row's own that the format would not have written, under whatever instruction."""


class Instructions:
    """The instruction that each row of a stage is asked under, as `system` of the format would write it."""

    def __init__(self, fmt: Format, tokenizer: Any):
        self._fmt, self._tokenizer = fmt, tokenizer
        self._counts = lru_cache(maxsize=1024)(lambda system: _counts(fmt, system, tokenizer))

    @cached_property
    def _own(self) -> OwnPrompts:
        return OwnPrompts(self._fmt, self._tokenizer)

    def of(self, system: str | None) -> str | None:
        """Of a row with this system message."""
        return system if system and self._fmt.system is None and self._counts(system) else None

    def of_row(self, item: Demonstration) -> str | None:
        if item.prompt is None:
            return self.of(item.problem.system)
        found = self._own.read(item)
        if found is None:
            return OTHER
        return None if found[0] == self._fmt.own_system else found[0]

    def understood(self, items: Iterable[Demonstration]) -> list[Demonstration]:
        return [item if item.prompt is None else self._own.understood(item) for item in items]


def as_trained(stage: Stage, fmt: Format, tokenizer: Any, systems: Systems) -> Format:
    """The format with the most common instruction of a stage's rows; the tokenizer's template then has it too.

    It is saved next to the stage's checkpoints, where `lemma eval` and `lemma export` look for it.
    """
    trained, system = fmt, None
    for said, count in systems.most_common(1):
        if said == OTHER:
            stage.warn(
                f"{count} of {systems.total()} rows bring prompts that the format {fmt.name} does not write; "
                "evaluations ask in the format's own, which the model has not seen: name the format of these prompts"
            )
        elif said is not None:
            trained, system = fmt.model_copy(update={"system": said}), said
            if count < systems.total():
                stage.say(
                    f"the rows have {len(systems)} different system messages or none; evaluations use the one of "
                    f"{count} of {systems.total()} rows"
                )
    learnt = None if stage.taught_in is None else trained_system(stage.folder.stage(stage.taught_in))
    if learnt is not None and learnt != (system or fmt.own_system):
        stage.warn(
            f"stage {stage.taught_in} was trained under the instruction of its rows, and this stage asks under "
            "another; to keep that of the rows, name it as `format.system`"
        )
    trained.install(tokenizer)
    folder = stage.folder.stage(stage.name)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / PROMPT_FILE, json.dumps({"system": system}, ensure_ascii=False) + "\n")
    return trained


def _counts(fmt: Format, system: str, tokenizer: Any) -> bool:
    """Whether the format renders a row's system message exactly as it would its own."""
    asked = Message("user", "?")
    own = fmt.model_copy(update={"system": system}).prompt(Problem((asked,)), tokenizer)
    return fmt.prompt(Problem((Message("system", system), asked)), tokenizer) == own


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
