"""Rows that a program hands over in place of a file: a list of mappings, a `datasets.Dataset`, or a pandas
`DataFrame`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from lemma.core.errors import UserError
from lemma.core.files import write_whole

FOLDER_ENDING = ".rows"


def are_rows(value: Any) -> bool:
    """Whether a value is meant as rows and not as the name of a source."""
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping | BaseModel)


def write_rows(rows: Iterable[Any], run_dir: str) -> str:
    """The file that holds these rows from now on, next to the run folder; its name follows from its content.

    So the same rows are the same data for a run that goes on, and others are other data.
    """
    lines = [_line(row, number) for number, row in enumerate(_mappings(rows), start=1)]
    if not lines:
        raise UserError("`source` holds no rows", fix="give at least one")
    content = "".join(lines)
    folder = Path(f"{run_dir.rstrip('/')}{FOLDER_ENDING}").expanduser()
    path = folder / f"{hashlib.sha256(content.encode()).hexdigest()[:16]}.jsonl"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
    return str(path)


def _mappings(rows: Any) -> Iterable[Any]:
    """A DataFrame iterates over the names of its columns, and has NaN for what is missing."""
    if not hasattr(rows, "iterrows"):
        return rows
    return rows.astype(object).where(rows.notna(), None).to_dict("records")


def _line(row: Any, number: int) -> str:
    if not isinstance(row, Mapping):
        raise UserError(
            f"row {number} of `source` is {row!r:.80}, not a mapping",
            fix='write rows such as {"question": "...", "answer": "..."}',
        )
    try:
        return json.dumps(dict(row), ensure_ascii=False) + "\n"
    except (TypeError, ValueError) as error:
        raise UserError(
            f"row {number} of `source` cannot be kept in a file: {error}", fix="write text, numbers, lists and mappings"
        ) from error
