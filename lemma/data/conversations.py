"""Rows to imitate word for word: prompts with a response or completion, conversations with tools, and plain text."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, TypeVar

from lemma.core.types import Demonstration, Judged, Message, Preference, Problem
from lemma.data.rows import (
    JsonError,
    Row,
    RowError,
    Values,
    as_messages,
    filled,
    golds,
    has,
    last_said,
    messages,
    optional_text,
    parsed,
    text,
)

T = TypeVar("T", bound=Problem | Demonstration | Preference | Judged)

TOOLS = "tools"
"""Key in `extra` under which a problem keeps the tools of its conversation, for the chat template."""
MARKS_OF_TEMPLATES = re.compile(
    r"<\|im_start\|>|<\|start_header_id\|>|<\|(?:user|assistant)\|>|<start_of_turn>|<｜User｜>|\[/INST\]"
    r"|### (?:Instruction|Response):|(?:^|\n)(?:User|Human): [\s\S]*\bAssistant:\s*(?:<think>)?\s*$"
)


def prompt_response(values: Values) -> Demonstration:
    """`prompt` or `question`, and `response`; `ground_truth` or `answer` where there is one."""
    return Demonstration(_problem(messages(values, "prompt", "question"), values), response=text(values, "response"))


def prompt_completion(values: Values) -> Demonstration:
    """`prompt` and `completion`: text, or the messages that follow the prompt's."""
    asked = messages(values, "prompt")
    if isinstance(values.get("completion"), str | None):
        return Demonstration(_problem(asked, values), response=text(values, "completion"))
    said = asked + as_messages(values["completion"], "completion")
    response = last_said(said, "completion")
    return Demonstration(_problem(said[:-1], values), response=response, turns_from=len(asked), more=said[-1].more)


def prompt_alone(values: Values) -> Problem:
    """`prompt`, text or messages: a problem whose samples are paid for something else than the right answer."""
    return _problem(messages(values, "prompt"), values)


def chat(values: Values) -> Demonstration:
    """`messages` (or `conversations`), which end with the assistant's; `tools` where it may call some."""
    said = messages(values, "messages", "conversations", "conversation")
    system = optional_text(values, "system")
    if system is not None and said[0].role != "system":
        said = (Message("system", system), *said)
    response = last_said(said, "messages")
    if len(said) < 2:
        raise RowError("the column 'messages' holds an answer and no question")
    return Demonstration(_problem(said[:-1], values), response=response, turns_from=0, more=said[-1].more)


def whole_text(values: Values) -> Demonstration:
    """`text`: there is no question, and all of it is trained on."""
    whole = text(values, "text")
    return Demonstration(Problem((Message("user", whole),)), response=whole, prompt="")


def of_schema(problem: Problem, values: Values) -> Demonstration:
    """A response among the columns of Lemma's own schema."""
    more: dict[str, Any] = {}
    if has(values, "calls"):
        try:
            more = parsed(text(values, "calls"))
        except JsonError as error:
            raise RowError(f"the column 'calls' is not JSON text: {error}") from error
    response = "" if more and not values["response"] else text(values, "response")
    start = values.get("turns_from")
    prompt = values.get("prompt")
    return Demonstration(
        problem,
        response=response,
        prompt=prompt if isinstance(prompt, str) else None,
        turns_from=None if start is None else int(start),
        more=more,
    )


def _problem(asked: tuple[Message, ...], values: Values) -> Problem:
    right = next((golds(values, name) for name in ("ground_truth", "answer") if has(values, name)), ())
    tools = _tools(values)
    return Problem(asked, right, extra={TOOLS: tools} if tools else {})


def _tools(values: Values) -> list[Any]:
    """The tools that a conversation may call: a list, or that list as JSON text."""
    tools = values.get(TOOLS)
    if isinstance(tools, str) and tools.strip():
        try:
            tools = parsed(tools)
        except JsonError as error:
            raise RowError(f"the column '{TOOLS}' is not JSON text: {error}") from error
    if not tools:
        return []
    if not isinstance(tools, list | tuple):
        raise RowError(f"the column '{TOOLS}' holds no list of tools")
    return [filled(tool) for tool in tools]


def word_for_word(item: T, row: Row) -> T:
    """The item with its question as the whole prompt, if it has a response."""
    if not isinstance(item, Demonstration) or item.prompt is not None:
        return item
    if [message.role for message in item.problem.messages] != ["user"]:
        raise row.error("`verbatim` wants prompts of text, and this one is messages", fix="remove `verbatim`")
    return replace(item, prompt=item.problem.question)


def mark_of_template(item: Any) -> str | None:
    """What shows that the question of a row with a response is a whole prompt, if it looks like one."""
    question = item.problem.question if isinstance(item, Demonstration) and item.prompt is None else ""
    found = MARKS_OF_TEMPLATES.search(question)
    if found is None:
        return None
    begin, colon, rest = found[0].strip().partition(": ")
    return f"{begin}: ... {rest[rest.rindex('Assistant:') :]}" if colon else begin
