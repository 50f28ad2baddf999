"""Columns with other names: a recipe maps them to ours, and errors use the names in the file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lemma.core.errors import nearest
from lemma.core.types import Demonstration, Judged, Preference, Problem
from lemma.data.rows import Row, Values

ROW = "row"
"""Key in `extra` under which a problem keeps its row, for rewards that ask for columns by name."""
NO_COLUMNS: Mapping[str, str] = {}
Item = Problem | Demonstration | Preference | Judged

ALIKE: dict[str, tuple[str, ...]] = {
    "question": ("question", "query", "problem", "prompt", "instruction", "input", "ask", "task"),
    "answer": ("answer", "gold", "target", "solution", "output", "result", "label", "response"),
    "reasoning": ("reason", "rationale", "explanation", "working", "cot", "thought", "steps"),
}
"""Other common names for each of our columns; part of a name is enough."""

KNOWN = "question and answer, prompt and completion, messages, text, chosen and rejected, or others in docs/data.md"


def check_columns(row: Row, columns: Mapping[str, str]) -> None:
    """Refuse a renamed column that is not in the first row."""
    for name in columns.values():
        if not _found(row.values, name)[0]:
            raise row.error(f"there is no column '{name}'", fix=f"in `columns`: {nearest(name, list(row.values))}")


def renamed(values: Values, columns: Mapping[str, str]) -> Values:
    """The values of a row under the names that readers know; `a.b` reaches into a column that holds named values."""
    if not columns:
        return values
    taken = set(columns.values())
    known = {name: value for name, value in values.items() if name not in taken}
    return known | {ours: _found(values, name)[1] for ours, name in columns.items()}


def _found(values: Values, name: str) -> tuple[bool, Any]:
    """Whether there is such a column, and what it holds."""
    if name in values:
        return True, values[name]
    inside: Any = values
    for part in name.split("."):
        if not isinstance(inside, Mapping) or part not in inside:
            return False, None
        inside = inside[part]
    return "." in name, inside


def with_columns(item: Item, row: Row) -> Item:
    """The item with its row attached, for functions that ask for columns by name."""
    problem = item if isinstance(item, Problem) else item.problem
    kept = replace(problem, extra={**problem.extra, ROW: dict(row.values)})
    return kept if isinstance(item, Problem) else replace(item, problem=kept)


def theirs(sentence: str, columns: Mapping[str, str]) -> str:
    """A sentence about columns, with the names in the file."""
    for ours, name in columns.items():
        sentence = sentence.replace(f"'{ours}'", f"'{name}'")
    return sentence


def repair(sentence: str) -> str | None:
    """What to do about this problem with a row, where that is obvious."""
    if sentence.endswith(("is null", "is empty")):
        return "fill it, or remove the row"
    return "write it as text" if sentence.endswith("holds true or false, not an answer") else None


def advice(values: Values) -> str:
    """Which columns of a row are probably meant, written as in a recipe."""
    guessed: dict[str, str] = {}
    for ours, names in ALIKE.items():
        free = [column for column in values if column not in guessed.values()]
        close = [column for name in names for column in free if name in column.lower()]
        if close:
            guessed[ours] = close[0]
    if not {"question", "answer"} <= set(guessed):
        guessed = {"question": "...", "answer": "..."}
    written = ", ".join(f"{ours}: {column}" for ours, column in guessed.items())
    return f"write which is which, such as `columns: {{{written}}}`; known are {KNOWN}"
