"""Tool calls as models write them, well and badly, and tools as Python functions describe them."""

from __future__ import annotations

import json
import time
from typing import Any, Literal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lemma.formats.tool_calls import Spoken, ToolCall, parse_tool_calls
from lemma.formats.tool_schema import Tool


def add(a: float, b: float, unit: Literal["m", "km"] = "m", notes: list[str] | None = None) -> float:
    """Add two lengths.

    Args:
        a: The first.
        b (float): The second,
            in the same unit.
        unit: Of both.

    Returns:
        Their sum.
    """
    return a + b


def python(code: str) -> str:
    """Run a program."""
    return code


TOOLS = [Tool.of(add), Tool.of(python)]
ADD = ToolCall("add", {"a": 2, "b": 3})


def test_a_tool_is_its_signature_and_docstring() -> None:
    assert Tool.of(add).as_dict() == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two lengths.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "number", "description": "The first."},
                    "b": {"type": "number", "description": "The second, in the same unit."},
                    "unit": {"type": "string", "enum": ["m", "km"], "description": "Of both."},
                    "notes": {"type": "array", "items": {"type": "string"}, "nullable": True, "description": ""},
                },
                "required": ["a", "b"],
            },
        },
    }
    assert Tool.from_dict(Tool.of(add).as_dict()) == Tool.of(add)


def test_an_argument_that_may_be_none_takes_null() -> None:
    def find(limit: int | None, order: Literal["up", "down", None] = None, key: int | str | None = None) -> None: ...

    tool = Tool.of(find)
    assert tool.checked({"limit": None, "order": None, "key": None}) == (
        {"limit": None, "order": None, "key": None},
        "",
    )
    assert tool.checked({"limit": 3, "order": "up", "key": "a"})[1] == ""
    assert tool.checked({"limit": "3"})[1] == "argument 'limit' of find must be of type integer or null"
    assert tool.checked({"limit": None, "order": "left"})[1] == "argument 'order' of find must be one of up, down"
    assert Tool.of(add).checked({"a": None, "b": 1})[1] == "argument 'a' of add must be of type number"

    def top(count: int = None, unit: Literal["m", "km"] = "m", untyped=None): ...  # type: ignore  # noqa: RUF013

    assert Tool.of(top).checked({"count": None, "untyped": None})[1] == ""
    assert Tool.of(top).checked({"count": "3"})[1] == "argument 'count' of top must be of type integer or null"
    assert Tool.of(top).checked({"unit": None})[1] == "argument 'unit' of top must be of type string"


@pytest.mark.parametrize(
    ("style", "text", "content", "calls"),
    [
        ("hermes", "Let me see.\n<tool_call>\n" + '{"name": "add", "arguments": {"a": 2, "b": 3}}' + "\n</tool_call>",
         "Let me see.", [ADD]),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>' * 2, "", [ADD, ADD]),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}', "", [ADD]),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 2, \\"b\\": 3}"}</tool_call>', "", [ADD]),
        ("hermes", '<tool_call>{"name": "python", "arguments": {"code": "a\nb"}}</tool_call>', "",
         [ToolCall("python", {"code": "a\nb"})]),
        ("hermes", "<think><tool_call>{}</tool_call></think>5", "<think><tool_call>{}</tool_call></think>5",
         []),
        ("llama", '{"name": "add", "parameters": {"a": 2, "b": 3}}', "", [ADD]),
        ("llama", '<|python_tag|>{"name": "add", "parameters": {"a": 2, "b": 3}}; {"name": "add", "parameters": '
         '{"a": 2, "b": 3}}', "", [ADD, ADD]),
        ("llama", "<|python_tag|>add.call(a=2, b=3)", "", [ADD]),
        ("llama", "<|python_tag|>print(2 + 3)", "", [ToolCall("python", {"code": "print(2 + 3)"})]),
        ("llama", "It is 5: {2, 3} added.", "It is 5: {2, 3} added.", []),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 2, "b": 3}}]', "", [ADD]),
        ("code", "So:\n```python\nprint(1)\n```\nand\n<code>x = 2</code>", "So:\n\nand",
         [ToolCall("python", {"code": "print(1)\nx = 2"})]),
        ("code", "```python\nprint(1)", "```python\nprint(1)", []),
    ],
)  # fmt: skip
def test_calls_are_read(style: Any, text: str, content: str, calls: list[ToolCall]) -> None:
    found = parse_tool_calls(text, style, TOOLS)
    assert (found.content, list(found.calls)) == (content, calls)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ('{"name": "add", "arguments": {"a": 2,}}', "not JSON"),
        ("add(2, 3)", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"arguments": {}}', 'a JSON object with "name"'),
        ('{"name": "add", "arguments": 7}', "are not a JSON object"),
        ('{"name": "multiply", "arguments": {}}', "there is no tool 'multiply'; there are: add, python"),
        ('{"name": "add", "arguments": {"a": 2}}', "add needs the argument 'b'"),
        ('{"name": "add", "arguments": {"a": 2, "c": 3}}', "add has no argument 'c'; it takes: a, b, unit, notes"),
        ('{"name": "add", "arguments": {"a": 2, "b": "3"}}', "argument 'b' of add must be of type number"),
        ('{"name": "add", "arguments": {"a": 2, "b": true}}', "argument 'b' of add must be of type number"),
        ('{"name": "add", "arguments": {"a": 2, "b": 3, "unit": "mile"}}', "must be one of m, km"),
    ],
)
def test_what_cannot_be_called_is_answered_in_words(call: str, words: str) -> None:
    (found,) = parse_tool_calls(f"<tool_call>{call}</tool_call>", "hermes", TOOLS).calls
    assert words in found.fault


def test_a_block_goes_to_the_tool_that_takes_a_text() -> None:
    def calculator(expression: str) -> str:
        return expression

    (call,) = parse_tool_calls("<code> 3 + 4 </code>", "code", [Tool.of(calculator)]).calls
    assert call == ToolCall("calculator", {"expression": "3 + 4"})


def test_code_is_there_in_every_style() -> None:
    assert parse_tool_calls("<code>x</code>", "hermes").code == "x"
    assert parse_tool_calls("<code> x = 1\ny = 2 </code>", "hermes").code == "x = 1\ny = 2"
    assert parse_tool_calls("  ```python\n  if x:\n      y\n  ```", "hermes").code == "if x:\n    y"
    assert parse_tool_calls("<think><code>x</code></think>", "hermes").code is None
    assert parse_tool_calls("<think><code>x</code>", "hermes") == Spoken("<think><code>x</code>")


@given(st.sampled_from(["hermes", "llama", "mistral", "code"]), st.text(max_size=60), st.text(max_size=60))
def test_nothing_that_a_model_writes_raises(style: Any, left: str, right: str) -> None:
    for text in (
        left,
        f"<tool_call>{left}</tool_call>{right}",
        f"<|python_tag|>{left}",
        "{" + left,
        "[TOOL_CALLS]" + left,
    ):
        parse_tool_calls(text, style, TOOLS)


@given(st.dictionaries(st.text(max_size=5), st.one_of(st.text(max_size=9), st.integers(), st.none()), max_size=3))
@example({"": "<think>"})
@example({"": "</think>", "<think>": ""})
@example({"": "<tool_call>{</think>"})
def test_what_is_written_as_json_is_read_back(arguments: dict[str, Any]) -> None:
    said, calls = json.dumps({"name": "any", "arguments": arguments}), (ToolCall("any", arguments),)
    for style, text in {
        "hermes": f"<tool_call>{said}</tool_call>",
        "llama": said,
        "mistral": f"[TOOL_CALLS][{said}]",
    }.items():
        assert parse_tool_calls(text, style).calls == calls  # type: ignore[arg-type]
        thoughts = f"<think>as in {text}</think>"
        found = parse_tool_calls(f"{thoughts}\n{text}", style)  # type: ignore[arg-type]
        assert found.calls == calls and found.content.strip() == thoughts
        assert not parse_tool_calls(f"<think>as in {text}", style).calls  # type: ignore[arg-type]
    several = parse_tool_calls(f"<|python_tag|>{said}; {said}", "llama")
    assert several.calls == calls * 2


def test_a_call_may_quote_tags_and_stay_open() -> None:
    code = json.dumps({"name": "python", "arguments": {"code": "'</tool_call>' + '<tool_call>'"}})
    found = parse_tool_calls(
        f"a<tool_call>{code}\n<tool_call>{{]</tool_call> b <tool_call>{code}}}</tool_call>", "hermes"
    )
    assert [bool(call.fault) for call in found.calls] == [False, True, False] and found.content == "a b"


@pytest.mark.parametrize("style", ["hermes", "llama", "mistral", "code"])
@pytest.mark.parametrize("word", ["<code>", "```python\n", "<tool_call>", "[TOOL_CALLS]", "<|python_tag|>"])
def test_a_model_that_opens_calls_without_end_is_read_in_no_time(style: Any, word: str) -> None:
    text = word * 6000
    begin = time.process_time()
    parse_tool_calls(text, style)
    assert time.process_time() - begin < 2.0
