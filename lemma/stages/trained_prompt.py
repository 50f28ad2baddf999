"""The prompt that a stage trains with, for evaluating its model: rows may have their own system message.

It replaces the format's instruction in training. Benchmark problems have none, and would be asked under an instruction
that the model never saw.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

from lemma.core.files import write_whole
from lemma.core.types import Message, Problem
from lemma.formats import Format
from lemma.runs.prompt_file import PROMPT_FILE
from lemma.runs.stage import Stage

Systems = Counter[str | None]


def systems_of(problems: Iterable[Problem]) -> Systems:
    """How often each system message, or none, occurs in these problems."""
    return Counter(problem.system for problem in problems)


def as_trained(stage: Stage, fmt: Format, tokenizer: Any, systems: Systems) -> Format:
    """The format with the most common system message of a stage's rows; the tokenizer's template then has it too.

    It is saved next to the stage's checkpoints, where `lemma eval` and `lemma export` look for it.
    """
    trained, system = fmt, None
    for said, count in systems.most_common(1):
        if said and fmt.system is None and _counts(fmt, said, tokenizer):
            trained, system = fmt.model_copy(update={"system": said}), said
            if count < systems.total():
                stage.say(
                    f"the rows have {len(systems)} different system messages or none; evaluations use the one of "
                    f"{count} of {systems.total()} rows"
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
