"""The rows of one file: JSON, CSV, TSV, parquet and arrow. Every type is read in pieces, except a JSON file that is one
list."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import itertools
import math
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lemma.core.errors import UserError
from lemma.core.events import counted
from lemma.data.bounded_lines import BoundedLines, check_is_file
from lemma.data.rows import JsonError, Row, parsed

TEXT_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".csv", ".csv.gz", ".tsv", ".tsv.gz")
SUFFIXES = (".parquet", *TEXT_SUFFIXES, ".arrow")
MMLU_COLUMNS = ["question", "A", "B", "C", "D", "answer"]
SEPARATORS = (",", ";", "\t", "|")
SNIFFED = 20
"""Number of records from which the separator of a CSV file is guessed."""
AT_ONCE = 1024
"""Rows of a table in memory at a time."""


def suffix_of(path: Path) -> str | None:
    return next((suffix for suffix in SUFFIXES if path.name.endswith(suffix)), None)


def read_file(path: Path) -> Iterator[Row]:
    """The rows of one file, each with its line number if the file has lines."""
    kind = suffix_of(path) or ""
    check_is_file(path)
    try:
        if kind in (".parquet", ".arrow"):
            yield from _table_rows(path, kind)
            return
        with open(path, "rb") as raw, gzip.open(raw, "rb") if kind.endswith(".gz") else raw as handle:
            newline = "" if kind.startswith((".csv", ".tsv")) else "\n"
            bounded: Any = BoundedLines(handle, path)
            text = io.TextIOWrapper(bounded, encoding="utf-8-sig", newline=newline)
            rows = _text_rows(path, kind, text)
            yield from counted(rows, f"reading {path.name} (bytes)", path.stat().st_size, raw.tell)
    except UnicodeDecodeError as error:
        raise UserError("this file is not UTF-8 text", file=path, fix="save it as UTF-8") from error
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise UserError("this gzip file is damaged", file=path, fix="write or download it again") from error
    except PermissionError as error:
        raise UserError("there is no permission to read this file", file=path, fix="change its permissions") from error


def _text_rows(path: Path, kind: str, text: io.TextIOWrapper) -> Iterator[Row]:
    if kind.startswith(".csv"):
        yield from _csv_rows(path, text)
    elif kind.startswith(".tsv"):
        yield from _csv_rows(path, text, "\t")
    elif not kind.startswith(".jsonl"):
        skipped, first = _first_line(text)
        if first.lstrip().startswith("["):
            yield from _json_rows(path, "\n" * skipped + first + text.read())
        else:
            yield from _line_rows(path, itertools.chain([first], text), skipped + 1)
    else:
        yield from _line_rows(path, text)


def _first_line(text: io.TextIOWrapper) -> tuple[int, str]:
    """The first line that is not blank, and how many blank ones precede it."""
    for skipped, line in enumerate(text):
        if line.strip():
            return skipped, line
    return 0, ""


def _line_rows(path: Path, lines: Iterator[str] | io.TextIOWrapper, start: int = 1) -> Iterator[Row]:
    number = 0
    for line, one in enumerate(lines, start=start):
        if not one.strip():
            continue
        try:
            values = parsed(one.removesuffix("\n"))
        except JsonError as error:
            raise UserError(
                f"this line is not JSON: {error}",
                file=path,
                line=line,
                fix="each line must be one whole JSON object",
            ) from error
        number += 1
        yield _row(values, path, number, line)


def _json_rows(path: Path, content: str) -> Iterator[Row]:
    try:
        rows = parsed(content)
    except JsonError as error:
        raise UserError(
            f"this file is not JSON: {error}", file=path, line=error.line, fix="write a list of objects"
        ) from error
    for number, values in enumerate(rows, start=1):
        yield _row(values, path, number, None)


def _row(values: Any, path: Path, number: int, line: int | None) -> Row:
    if not isinstance(values, dict):
        where = "" if line is not None else f"row {number} is "
        raise UserError(
            f"{where}{type(values).__name__} where an object was expected",
            file=path,
            line=line,
            fix='write rows such as {"question": "...", "answer": "..."}',
        )
    return Row(values, str(path), number, line)


def _csv_rows(path: Path, text: io.TextIOWrapper, separator: str | None = None) -> Iterator[Row]:
    """Rows under a header; MMLU's files have none and are recognised by the letter in their last cell."""
    csv.field_size_limit(sys.maxsize)
    if separator is None:
        beginning = list(itertools.islice(text, 10 * SNIFFED))
        separator, lines = _separator(beginning), itertools.chain(beginning, text)
    else:
        lines = itertools.chain(text)
    reader = csv.reader(lines, strict=True, delimiter=separator)
    names: list[str] = []
    number = 0
    try:
        for cells in reader:
            if not names and not (len(cells) == len(MMLU_COLUMNS) and cells[-1] in {"A", "B", "C", "D"}):
                names = cells
                _check_header(path, names, reader.line_num)
                continue
            names = names or MMLU_COLUMNS
            if not cells:
                continue
            if len(cells) != len(names):
                raise UserError(
                    f"{len(cells)} cells under a header of {len(names)}",
                    file=path,
                    line=reader.line_num,
                    fix=f"quote cells that hold {_spoken(separator)} or line breaks",
                )
            number += 1
            values = {name: cell or None for name, cell in zip(names, cells, strict=True)}
            yield Row(values, str(path), number, reader.line_num)
    except csv.Error as error:
        raise UserError(
            f"this is not CSV: {error}", file=path, line=reader.line_num, fix="repair the quotes"
        ) from error


def _spoken(separator: str) -> str:
    return {",": "commas", ";": "semicolons", "\t": "tabs"}.get(separator, f"'{separator}'")


def _separator(beginning: list[str]) -> str:
    """The separator: the first known one that splits all of the first records into the same number of cells, at least
    two."""
    for separator in SEPARATORS:
        sizes: set[int] = set()
        with contextlib.suppress(csv.Error):  # the last record may be incomplete
            reader = csv.reader(beginning, delimiter=separator, strict=True)
            sizes.update(len(cells) for cells in itertools.islice(reader, SNIFFED) if cells)
        if len(sizes) == 1 and sizes != {1}:
            return separator
    return ","


def _check_header(path: Path, names: list[str], line: int) -> None:
    """Refuse a name that two columns share: one of them would be lost."""
    twice = [name for name in dict.fromkeys(names) if name and names.count(name) > 1]
    if twice:
        raise UserError(
            f"{names.count(twice[0])} columns are called '{twice[0]}'", file=path, line=line, fix="rename all but one"
        )


def _table_rows(path: Path, kind: str) -> Iterator[Row]:
    import pyarrow

    number = 0
    try:
        for batch in _parquet_batches(path) if kind == ".parquet" else _arrow_batches(path):
            for values in batch.to_pylist():
                number += 1
                yield Row(without_nan(values), str(path), number)
    except PermissionError:
        raise
    except (pyarrow.ArrowException, OSError) as error:
        with open(path, "rb") as handle:
            start = handle.read(40)
        pointer = start.startswith(b"version https://git-lfs")
        fix = "it is a Git LFS pointer: run `git lfs pull`" if pointer else "write or download it again"
        name = kind.removeprefix(".")
        broken = isinstance(error, pyarrow.ArrowInvalid)
        what = (
            f"this is not {'an' if name == 'arrow' else 'a'} {name} file" if broken else f"this {name} file is damaged"
        )
        raise UserError(what, file=path, fix=fix) from error


def _parquet_batches(path: Path) -> Iterator[Any]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        yield from file.iter_batches(batch_size=AT_ONCE)


def _arrow_batches(path: Path) -> Iterator[Any]:
    """The record batches of an arrow file: `datasets` saves streams, other tools write files with an index."""
    import pyarrow

    with pyarrow.memory_map(str(path)) as source:
        try:
            reader = pyarrow.ipc.open_stream(source)
        except pyarrow.ArrowInvalid:
            source.seek(0)
            file = pyarrow.ipc.open_file(source)
            reader = (file.get_batch(place) for place in range(file.num_record_batches))
        for batch in reader:
            for start in range(0, batch.num_rows, AT_ONCE):
                yield batch.slice(start, AT_ONCE)


def without_nan(values: dict[str, Any]) -> dict[str, Any]:
    """The cells of a row, without NaN, which is how tables store what is absent."""
    return {name: None if isinstance(cell, float) and math.isnan(cell) else cell for name, cell in values.items()}
