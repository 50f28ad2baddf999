"""Tool calls in a policy's text, in the syntax of its chat template.

Nothing here raises on what a model writes: a call that cannot be parsed has a `fault`, a sentence to reply with.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from textwrap import dedent
from typing import Any, Literal

from lemma.formats.tool_schema import Tool

Style = Literal["hermes", "llama", "mistral", "code"]
"""`hermes`: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, as Qwen 2.5, Qwen 3 and Hermes write it.
`llama`: {"name": ..., "parameters": {...}}, with or without <|python_tag|>. `mistral`: [TOOL_CALLS] and a list.
`code`: ```python blocks, or <code>...</code>: for the tool `python`, or else the first tool that takes a text."""

PYTHON_TAG, TOOL_CALLS = "<|python_tag|>", "[TOOL_CALLS]"
CALL, CALLED = "<tool_call>", "</tool_call>"
CODE = re.compile(r"<code>|^[ \t]*```(?:python|py)[ \t]*\n", re.MULTILINE)
CODE_ENDS = {"<": re.compile("</code>"), "`": re.compile(r"^[ \t]*```", re.MULTILINE)}
SPACE = re.compile(r"\s*")
THINK, THOUGHT = "<think>", "</think>"
MARKS = re.compile("|".join(map(re.escape, (THINK, THOUGHT, CALL, PYTHON_TAG, TOOL_CALLS))))
CODE_TOOL = "python"
LONGEST = 1_000_000
# Models write raw line breaks in strings.
DECODER = json.JSONDecoder(strict=False)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call. `fault` says why it cannot be made; name and arguments are then whatever could be parsed."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)
    fault: str = ""

    def as_dict(self) -> dict[str, Any]:
        """In the form that chat templates take."""
        return {"type": "function", "function": {"name": self.name, "arguments": dict(self.arguments)}}


@dataclass(frozen=True, slots=True)
class Spoken:
    """A parsed turn: the text around the calls, the calls, and the code of all code blocks, None without one."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    code: str | None = None


def parse_tool_calls(text: str, style: Style, tools: Sequence[Tool] | None = None) -> Spoken:
    """Parse the calls in a text; if the tools are known, names and arguments are checked too.

    Text between <think> and </think> makes no calls.
    """
    thoughts, said = split_thoughts(text[:LONGEST])
    content, calls = READERS[style](said)
    if tools is not None:
        known = {tool.name: tool for tool in tools}
        calls = [_checked(_taken(call, known) if style == "code" else call, known) for call in calls]
    return Spoken(thoughts + content, tuple(calls), code_of(said))


def split_thoughts(text: str) -> tuple[str, str]:
    """The reasoning with its tags, and the text after it; without an end of the reasoning there is no text. A tag in
    the JSON of a call is part of the call."""
    is_open, end, place = False, 0, _behind_json(text, 0)
    while found := MARKS.search(text, place):
        place = found.end()
        if found[0] == THINK:
            is_open = True
            continue
        if found[0] == THOUGHT:
            is_open, end = False, place
        place = _behind_json(text, place)
    return (text, "") if is_open else (text[:end], text[end:])


def _behind_json(text: str, place: int) -> int:
    """Where the JSON values that begin here end; this place if there are none."""
    while (begin := _behind_space(text, place)) < len(text) and text[begin] in "{[;,":
        if text[begin] in ";,":
            place = begin + 1
            continue
        try:
            _, place = DECODER.raw_decode(text, begin)
        except (ValueError, RecursionError):
            break
    return place


def code_of(text: str) -> str | None:
    """The code of all closed code blocks, concatenated; None without one."""
    # Spaces after an opening tag are not indentation.
    blocks = [dedent(text[begin:end].strip("\n")).strip() for _, begin, end, _ in _code_blocks(text)]
    return "\n".join(blocks) if blocks else None


def _code_blocks(text: str) -> list[tuple[int, int, int, int]]:
    """Positions of each closed block: its start, the start and end of its code, and its end.

    In linear time: models may write an opening tag thousands of times.
    """
    blocks, place, unclosed = [], 0, set[str]()
    while found := CODE.search(text, place):
        mark, place = found[0].lstrip()[0], found.end()
        end = None if mark in unclosed else CODE_ENDS[mark].search(text, place)
        if end is None:
            unclosed.add(mark)
        else:
            blocks.append((found.start(), place, end.start(), end.end()))
            place = end.end()
    return blocks


def _hermes(text: str) -> tuple[str, list[ToolCall]]:
    """A closing tag inside a JSON string does not close the call; a call may stay open; text after its JSON is
    dropped."""
    content, calls, place, closed = "", [], 0, 0
    while (begin := text.find(CALL, place)) >= 0:
        content += text[place:begin]
        call, end = _decoded(text, _behind_space(text, begin + len(CALL)))
        calls.append(call)
        if 0 <= closed < end:
            closed = text.find(CALLED, end)
        opened = text.find(CALL, end)
        place = len(text) if closed < 0 else closed + len(CALLED)
        place = opened if 0 <= opened < place else place
    return (content + text[place:]).strip(), calls


def _behind_space(text: str, place: int) -> int:
    found = SPACE.match(text, place)
    assert found is not None
    return found.end()


def _llama(text: str) -> tuple[str, list[ToolCall]]:
    content, tag, rest = text.partition(PYTHON_TAG)
    body = (rest if tag else text).strip()
    if body.startswith("{"):
        return (content.strip() if tag else ""), _listed(body)
    if not tag:
        return text, []
    return content.strip(), [_from_python(body)]


def _mistral(text: str) -> tuple[str, list[ToolCall]]:
    content, tag, rest = text.partition(TOOL_CALLS)
    return content.strip() if tag else text, _listed(rest.strip()) if tag else []


def _code(text: str) -> tuple[str, list[ToolCall]]:
    code, content, place = code_of(text), "", 0
    for begin, _, _, end in _code_blocks(text):
        content, place = content + text[place:begin], end
    return (content + text[place:]).strip(), [] if code is None else [ToolCall(CODE_TOOL, {"code": code})]


READERS: dict[Style, Callable[[str], tuple[str, list[ToolCall]]]] = {
    "hermes": _hermes,
    "llama": _llama,
    "mistral": _mistral,
    "code": _code,
}


def _listed(text: str) -> list[ToolCall]:
    """Consecutive calls, with or without `;` between them, or as one list; whatever follows them is dropped."""
    calls: list[ToolCall] = []
    while text.startswith(("{", "[")):
        try:
            value, end = DECODER.raw_decode(text)
        except (ValueError, RecursionError) as error:
            return [*calls, _broken(error)]
        calls += [_from_object(one) for one in (value if isinstance(value, list) else [value])]
        text = text[end:].lstrip(" \n\t;,")
    return calls


def _decoded(text: str, begin: int) -> tuple[ToolCall, int]:
    """The call whose JSON begins at this position, and where it ends."""
    try:
        value, end = DECODER.raw_decode(text, begin)
    except (ValueError, RecursionError) as error:
        return _broken(error, begin), begin
    return _from_object(value), end


def _broken(error: Exception, begin: int = 0) -> ToolCall:
    where = f": {error.msg} at character {error.pos - begin}" if isinstance(error, json.JSONDecodeError) else ""
    return ToolCall("", {}, f"this call is not JSON{where}")


def _from_object(call: Any) -> ToolCall:
    """A call from a JSON object, under either of the two names for its arguments."""
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        call = call["function"]
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall("", {}, 'a call is a JSON object with "name" and "arguments"')
    name, arguments = call["name"], call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, strict=False)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        return ToolCall(name, {}, f"the arguments of {name} are not a JSON object")
    return ToolCall(name, arguments)


def _from_python(body: str) -> ToolCall:
    """What Llama writes after its python tag: `name.call(argument=value)`, or a program."""
    try:
        call = ast.parse(body, mode="eval").body
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "call":
            arguments = {one.arg: ast.literal_eval(one.value) for one in call.keywords if one.arg is not None}
            return ToolCall(ast.unparse(call.func.value), arguments)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        pass
    return ToolCall(CODE_TOOL, {"code": body})


def _taken(call: ToolCall, known: Mapping[str, Tool]) -> ToolCall:
    """A code block is for the tool `python`; without such a tool, for the first one that needs a single text."""
    code = call.arguments["code"]
    for tool in known.values() if CODE_TOOL not in known else ():
        needed = tool.parameters.get("required", ())
        if len(needed) == 1 and tool.parameters["properties"][needed[0]].get("type") == "string":
            return ToolCall(tool.name, {needed[0]: code})
    return call


def _checked(call: ToolCall, known: Mapping[str, Tool]) -> ToolCall:
    if call.fault:
        return call
    if call.name not in known:
        return replace(call, fault=f"there is no tool '{call.name[:80]}'; there are: {', '.join(known) or 'none'}")
    arguments, fault = known[call.name].checked(call.arguments)
    return replace(call, arguments=arguments, fault=fault)
