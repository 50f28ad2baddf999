"""How a model calls tools: found from what its chat template renders, not from its name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from lemma.core.errors import UserError
from lemma.core.types import Problem
from lemma.formats.tool_calls import Spoken, Style, ToolCall, parse_tool_calls
from lemma.formats.tool_schema import Tool

if TYPE_CHECKING:
    from lemma.formats.format import Format

OFFERED = "offered_tools"
"""Key in `extra` under which a problem keeps the tools that its environment offers, as `offer` writes them."""

PROBE = Tool("probe_of_tools", "Looks\u2063whether\u2063tools\u2063show.", {"type": "object", "properties": {}})
PROBED = ToolCall(PROBE.name, {})
ASKED = "WHO\u2063ASKS"
TAUGHT: tuple[Style, ...] = ("hermes", "llama", "mistral")
HOW = {
    "hermes": '<tool_call>\n{"name": "tool", "arguments": {"argument": "value"}}\n</tool_call>',
    "llama": '{"name": "tool", "parameters": {"argument": "value"}}',
    "mistral": '[TOOL_CALLS][{"name": "tool", "arguments": {"argument": "value"}}]',
}


@dataclass(frozen=True)
class ToolSpeech:
    """`style` is the syntax of calls. `by_template`: the template itself shows tools, calls and results, in that
    syntax."""

    style: Style
    by_template: bool
    tools: tuple[Tool, ...] = ()

    @classmethod
    def of(
        cls, fmt: Format, tokenizer: Any, tools: Sequence[Tool], wanted: Style | Literal["auto"] = "auto"
    ) -> ToolSpeech:
        """The template's own syntax, unless another one is requested; tools are then described in words."""
        key = (type(fmt), fmt.model_dump_json(), json.dumps(getattr(tokenizer, "chat_template", None)))
        if key not in _NATIVE_STYLES:
            _NATIVE_STYLES[key] = style_of(fmt, tokenizer)
        native = _NATIVE_STYLES[key]
        style = native or "hermes" if wanted == "auto" else wanted
        return cls(style, native == style, tuple(tools))

    def read(self, text: str) -> Spoken:
        return parse_tool_calls(text, self.style, self.tools)

    def described(self) -> str:
        """The tools and how to call them, in words, for a template without tool support."""
        listed = "\n".join(json.dumps(tool.as_dict()["function"], ensure_ascii=False) for tool in self.tools)
        if self.style == "code":
            how = "To use one, write a block:\n```python\n...\n```"
        else:
            how = f"To call one, write:\n{HOW[self.style]}"
        return f"You can use these tools:\n{listed}\n\n{how}\nThe result comes in the next message."


_NATIVE_STYLES: dict[Any, Style | None] = {}


def style_of(fmt: Format, tokenizer: Any) -> Style | None:
    """The syntax of calls that the template writes, if it shows tools as well; otherwise None."""
    turns: list[dict[str, Any]] = [{"role": "user", "content": ASKED}]
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": "call00000", **PROBED.as_dict()}]}
    tools = [PROBE.as_dict()]
    try:
        before = fmt.written(turns, tokenizer, tools=tools)
        after = fmt.written([*turns, call], tokenizer, tools=tools, is_open=False)
    except UserError:
        return None
    if PROBE.name not in before or PROBE.description not in before:
        return None
    said = after.removeprefix(before) if after.startswith(before) else after.rpartition(ASKED)[2]
    return next((style for style in TAUGHT if parse_tool_calls(said, style).calls == (PROBED,)), None)


def offer(problem: Problem, tools: Sequence[Tool], wanted: str, described: bool) -> Problem:
    """The problem with the tools that its prompt offers."""
    offered = {"tools": [tool.as_dict() for tool in tools], "style": wanted, "described": described}
    return replace(problem, extra={**problem.extra, OFFERED: offered})


def with_offer(fmt: Format, problem: Problem, tokenizer: Any) -> Problem:
    """The problem as its prompt shows it: with tools for the template, or a description before the question."""
    offered: Mapping[str, Any] | None = problem.extra.get(OFFERED)
    if not offered or not offered["described"]:
        return problem
    tools = [Tool.from_dict(one) for one in offered["tools"]]
    speech = ToolSpeech.of(fmt, tokenizer, tools, offered["style"])
    if speech.by_template:
        return replace(problem, extra={**problem.extra, "tools": offered["tools"]})
    first = next((number for number, message in enumerate(problem.messages) if message.role == "user"), None)
    if first is None:
        return problem
    asked = problem.messages[first]
    told = replace(asked, content=f"{speech.described()}\n\n{asked.content}")
    return replace(problem, messages=(*problem.messages[:first], told, *problem.messages[first + 1 :]))
