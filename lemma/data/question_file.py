"""Questions from a file: one per line, or JSON lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lemma.core.errors import UserError
from lemma.core.types import Message, Problem

EXAMPLE = '{"question": "What is 6 times 7?"}'


def read_questions(path: Path) -> list[Problem]:
    """The questions of a .jsonl file (`question` or `messages` in each row) or of a text file (one on each line)."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, IsADirectoryError, UnicodeDecodeError) as error:
        what = "is not a text file" if isinstance(error, UnicodeDecodeError) else "is not there"
        raise UserError(f"the file {path} {what}", fix="name a .txt file with a question on each line") from None
    is_json = path.suffix in (".jsonl", ".json")
    problems = [
        _from_row(line, path, number) if is_json else Problem((Message("user", line.strip()),))
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not problems:
        raise UserError(f"the file {path} has no questions", fix="write one on each line")
    return problems


def _from_row(line: str, path: Path, number: int) -> Problem:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"this is not JSON ({error.msg})", file=path, line=number, fix=f"write {EXAMPLE}") from None
    question = row.get("question") if isinstance(row, dict) else None
    if isinstance(question, str) and question.strip():
        return Problem((Message("user", question.strip()),))
    messages = row.get("messages") if isinstance(row, dict) else None
    if isinstance(messages, list) and messages and all(_is_message(message) for message in messages):
        return Problem(tuple(Message(message["role"], message["content"]) for message in messages))
    raise UserError(
        "the row has neither a question nor messages with role and content", file=path, line=number,
        fix=f"write {EXAMPLE}",
    )  # fmt: skip


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in ("role", "content"))
