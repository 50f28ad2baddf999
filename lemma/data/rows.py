"""One row of a dataset, its location, and typed access to its columns.

A reader gets what it needs through these functions; if something is missing they raise `RowError`, and the code that
reads the file adds its name, the line, and the columns that exist.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from lemma.core.errors import UserError
from lemma.core.types import Message

Values = Mapping[str, Any]

LARGEST_PROBABILITY = 1.001
"""Probabilities computed in half precision can be slightly above 1."""


class RowError(Exception):
    """What one row lacks, in a few words."""


class LeftOut(RowError):
    """A row that is well formed but useless; known datasets have some, so they are counted and left out."""


class JsonError(Exception):
    """Why a text is not usable JSON, in a few words, and the line, if known."""

    def __init__(self, problem: str, line: int | None = None):
        super().__init__(problem)
        self.line = line


def parsed(content: str) -> Any:
    """The value of a JSON text. NaN, which is not JSON but how some tables write absent values, becomes null."""
    try:
        value = json.loads(content, parse_constant=lambda name: None if name == "NaN" else float(name))
        if "\\ud" in content or "\\uD" in content:
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        reason = error.msg.removesuffix(" starting at")
        raise JsonError(f"{reason} at column {error.colno}", error.lineno) from error
    except UnicodeEncodeError as error:
        raise JsonError("it holds half of a surrogate pair, which is no character") from error
    except RecursionError as error:
        raise JsonError("it is nested too deeply") from error
    except ValueError as error:
        raise JsonError("it holds a whole number of too many digits") from error
    return value


class Row(NamedTuple):
    """The values of one row and its location: a line of a text file, or just its number, counted from 1."""

    values: Values
    file: str
    number: int
    line: int | None = None

    def error(self, problem: str, fix: str | None = None) -> UserError:
        """An error that says what is wrong with this row."""
        where = "" if self.line is not None else f"row {self.number}: "
        columns = ", ".join(str(name) for name in self.values) or "none"
        return UserError(f"{where}{problem} (columns: {columns})", file=self.file, line=self.line, fix=fix)


def has(values: Values, *names: str) -> bool:
    """Whether all of these columns exist and are not null."""
    return all(values.get(name) is not None for name in names)


def _first(values: Values, names: tuple[str, ...]) -> tuple[str, Any]:
    for name in names:
        if values.get(name) is not None:
            return name, values[name]
    wanted = " or ".join(f"'{name}'" for name in names)
    state = "is null" if any(name in values for name in names) else "is missing"
    raise RowError(f"the column {wanted} {state}")


def _kind(value: Any) -> str:
    names = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)


def text(values: Values, *names: str) -> str:
    """The text of the first of these columns that is there; never blank."""
    name, value = _first(values, names)
    if not isinstance(value, str):
        raise RowError(f"the column '{name}' holds {_kind(value)}, not text")
    if not value.strip():
        raise RowError(f"the column '{name}' is empty")
    return value


def optional_text(values: Values, *names: str) -> str | None:
    """The first of these columns that is there, as text; a number is written out."""
    for name in names:
        value = values.get(name)
        if value is not None and value != "":
            return written(value)
    return None


def written(value: Any) -> str:
    """A value as text; whole floats lose their `.0`, because integer columns with gaps are stored as floats."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return value if isinstance(value, str) else str(value)


def golds(values: Values, *names: str) -> tuple[str, ...]:
    """The right answers in the first of these columns that is there: text, a number, or a list of these."""
    name, value = _first(values, names)
    entries = list(value) if isinstance(value, list | tuple) else [value]
    for one in entries:
        if isinstance(one, bool) or not isinstance(one, str | int | float):
            raise RowError(f"the column '{name}' holds {_kind(one)}, not an answer")
    answers = tuple(written(one).strip() for one in entries)
    if not answers or not all(answers):
        raise RowError(f"the column '{name}' is empty")
    return answers


def table(values: Values, name: str) -> Values:
    """A column that holds an object."""
    _, value = _first(values, (name,))
    if not isinstance(value, Mapping):
        raise RowError(f"the column '{name}' holds {_kind(value)}, not an object")
    return value


def listed(values: Values, name: str) -> list[Any]:
    _, value = _first(values, (name,))
    if not isinstance(value, list | tuple) or not value:
        raise RowError(f"the column '{name}' holds {_kind(value) if value else 'nothing'}, not a list")
    return list(value)


def probabilities(values: Values, *names: str) -> list[float] | None:
    """The first of these columns that holds anything: a list of numbers from 0 to 1; None where none does."""
    name = next((name for name in names if values.get(name)), None)
    if name is None:
        return None
    numbers = listed(values, name)
    for one in numbers:
        if isinstance(one, bool) or not isinstance(one, int | float) or not 0 <= one <= LARGEST_PROBABILITY:
            raise RowError(f"the column '{name}' holds {one!r}, which is not a probability from 0 to 1")
    return [min(float(one), 1.0) for one in numbers]


def messages(values: Values, *names: str) -> tuple[Message, ...]:
    """A conversation: text is one message of the user; a list holds role/content (or from/value) objects."""
    name, value = _first(values, names)
    if isinstance(value, str):
        return (Message("user", text(values, name)),)
    return as_messages(value, name)


def as_messages(value: Any, name: str) -> tuple[Message, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise RowError(f"the column '{name}' holds {_kind(value) if value else 'nothing'}, not a list of messages")
    return tuple(_message(one, name) for one in value)


ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
ROLES |= {"function": "tool", "observation": "tool", "ipython": "tool"}
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys under which messages keep reasoning separately; it is written into the text between think tags, as chat
templates do."""


def _message(one: Any, name: str) -> Message:
    if not isinstance(one, Mapping):
        raise RowError(f"a message of the column '{name}' is {_kind(one)}, not an object with 'role' and 'content'")
    role, content = one.get("role", one.get("from")), one.get("content", one.get("value"))
    calls = _calls(one.get("tool_calls"), name)
    if isinstance(content, list) and all(isinstance(part, Mapping) and "text" in part for part in content):
        content = "".join(str(part["text"]) for part in content)
    content = "" if content is None and calls else content
    if not isinstance(role, str) or not isinstance(content, str):
        raise RowError(f"a message of the column '{name}' lacks 'role' or 'content'")
    role = ROLES.get(role, role)
    thoughts = next((one[key] for key in THOUGHTS if isinstance(one.get(key), str) and one[key].strip()), None)
    if thoughts is not None and role == "assistant" and "</think>" not in content:
        content = f"<think>\n{thoughts.strip()}\n</think>\n\n{content.lstrip()}"
    more: dict[str, Any] = {"tool_calls": calls} if calls else {}
    if role == "tool":
        more |= {key: one[key] for key in ("name", "tool_call_id") if one.get(key) is not None}
    return Message(role, content, more)


def _calls(value: Any, name: str) -> list[dict[str, Any]]:
    """Tool calls as chat templates expect them: arguments as an object, without the nulls that a table adds."""
    if not value:
        return []
    calls = filled(value) if isinstance(value, list | tuple) else None
    if calls is None or not all(isinstance(call, Mapping) for call in calls):
        raise RowError(f"a message of the column '{name}' has 'tool_calls' that are not a list of objects")
    for call in calls:
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowError(f"a tool call of the column '{name}' names no function")
        if isinstance(function.get("arguments"), str):
            function["arguments"] = _arguments(function["arguments"], name)
        function.setdefault("arguments", {})
    return list(calls)


def _arguments(written_out: str, name: str) -> Any:
    try:
        return parsed(written_out) if written_out.strip() else {}
    except JsonError as error:
        raise RowError(f"the arguments of a tool call of the column '{name}' are not JSON: {error}") from error


def filled(value: Any) -> Any:
    """A value without its null fields: a table gives every object the keys of all others."""
    if isinstance(value, Mapping):
        return {key: filled(one) for key, one in value.items() if one is not None}
    return [filled(one) for one in value] if isinstance(value, list | tuple) else value


def last_said(said: tuple[Message, ...], name: str) -> str:
    """The assistant text that ends a conversation; empty if it is a tool call."""
    if said[-1].role != "assistant" or not (said[-1].content.strip() or said[-1].more):
        raise RowError(f"the column '{name}' does not end with a message of the assistant")
    return said[-1].content


BOX = re.compile(r"\\(?:boxed|fbox)(?:\s*(\{)|\s+([^\s${}][^\n$]*))")
"""A box with braces, or `\\boxed 2`, which ends with its formula or line."""


def boxed(solution: str) -> str | None:
    r"""The content of the last `\boxed{...}` of a solution, with balanced braces."""
    boxes = list(BOX.finditer(solution))
    if not boxes:
        return None
    if boxes[-1][2] is not None:
        return boxes[-1][2].strip().rstrip(".") or None
    start = boxes[-1].end(1)
    depth = 1
    for place in range(start, len(solution)):
        depth += {"{": 1, "}": -1}.get(solution[place], 0)
        if depth == 0:
            return solution[start:place].strip() or None
    return None


def level_of(values: Values) -> str | None:
    """`Level 3`, 3 and 3.0 are all level 3."""
    level = optional_text(values, "level")
    return None if level is None else re.sub(r"^level\s+", "", level.strip(), flags=re.IGNORECASE)
