"""Files of answers: rows in, the same rows with their verdicts out."""

from __future__ import annotations

import gzip
import json
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from lemma.core.errors import UserError, nearest
from lemma.evaluation.eval_settings import OURS
from lemma.evaluation.rescore import best, by_other
from lemma.grading import GradingService, Rules, Verdict
from lemma.grading.verdict import Kind, best_of


@contextmanager
def output(name: str | None) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Gives a function that writes a row at once. A file is called `.partial` until all rows are in it."""
    if name is None:
        yield lambda row: print(_line(row, sys.stdout.encoding or "utf-8"), end="", flush=True)
        return
    path = Path(name)
    try:
        plain = path.is_file() or not path.exists()
        partial = path.with_name(path.name + ".partial") if plain else path
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "w", encoding="utf-8") as handle:
            yield lambda row: print(_line(row), end="", file=handle, flush=True)
        if plain:
            os.replace(partial, path)
    except OSError as error:
        raise UserError(f"cannot write '{name}': {error.strerror or error}", fix="name another file by --to") from None


def _line(row: dict[str, Any], encoding: str = "utf-8") -> str:
    """A row as JSON; characters that the encoding cannot hold, such as half a surrogate pair, are escaped."""
    text = json.dumps(row, ensure_ascii=False) + "\n"
    try:
        text.encode(encoding)
        return text
    except UnicodeEncodeError:
        return json.dumps(row) + "\n"


def read_rows(name: str) -> list[tuple[int, dict[str, Any]]]:
    """The rows of the file with their line numbers; every line is read before anything is graded."""
    rows = []
    for number, line in enumerate(_lines(name), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.removeprefix("\ufeff"))
            json.dumps(row)
        except ValueError as error:
            raise UserError(f"this line is not JSON ({error})", file=name, line=number) from None
        except RecursionError:
            raise UserError(
                "this line is nested too deeply", file=name, line=number, fix="write flat rows of text"
            ) from None
        if not isinstance(row, dict):
            raise UserError(
                "this line is not an object", file=name, line=number, fix='write {"prediction": "...", "gold": "..."}'
            )
        rows.append((number, row))
    if not rows:
        raise UserError(
            "the file has no rows", file=name, fix='write one {"prediction": "...", "gold": "..."} per line'
        )
    return rows


def _lines(name: str) -> Iterator[str]:
    try:
        if name == "-":
            yield from sys.stdin
            return
        path = Path(name)
        if not path.is_file():
            raise UserError(f"there is no file '{name}'", fix="name a file of JSON lines, or - for standard input")
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as handle:
            yield from handle
    except UnicodeDecodeError:
        raise UserError("the file is not UTF-8 text", file=name, fix="save it as UTF-8 JSON lines") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        if "Not a gzipped file" in str(error):
            raise UserError("the file is not gzip", file=name, fix="name it .jsonl if it is plain text") from None
        raise UserError("the compressed file is damaged", file=name, fix="copy it again") from None
    except (OSError, ValueError) as error:
        raise UserError(f"the file cannot be read ({error})", file=name, fix="name a file that you can read") from None


def pair(row: dict[str, Any], line: int, columns: tuple[str, str], name: str) -> tuple[str, tuple[str, ...]]:
    """The prediction and the golds of a row of this file, from the columns of these names."""
    for column in columns:
        if column not in row:
            raise UserError(
                f"the row has no '{column}'",
                file=name,
                line=line,
                fix=f"name the columns by --prediction and --gold; {nearest(column, row)}",
            )
    prediction, gold = row[columns[0]], row[columns[1]]
    golds = gold if isinstance(gold, list) else [gold]
    for column, values in zip(columns, ([prediction], golds), strict=True):
        for value in values:
            if value is not None and not isinstance(value, str | int | float):
                raise UserError(f"'{column}' is not text", file=name, line=line, fix="write a string or a number")
    return _text(prediction), tuple(_text(one) for one in golds)


def _text(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)


def grade_all(
    pairs: Sequence[tuple[str, tuple[str, ...]]],
    rules: Rules,
    workers: int,
    graders: Sequence[str],
) -> Iterator[Verdict]:
    """Verdicts in the order of the rows, as they come."""
    with GradingService(workers) as service:
        yield from _ours(pairs, rules, service) if graders == [OURS] else _by(graders, pairs, rules, service)


def _ours(pairs: Sequence[tuple[str, tuple[str, ...]]], rules: Rules, service: GradingService) -> Iterator[Verdict]:
    answers = service.stream(((prediction, gold) for prediction, golds in pairs for gold in golds or ("",)), rules)
    for _, golds in pairs:
        yield best_of([next(answers) for _ in golds or ("",)])


def _by(
    graders: Sequence[str], pairs: Sequence[tuple[str, tuple[str, ...]]], rules: Rules, service: GradingService
) -> Iterator[Verdict]:
    """As `lemma eval --grader`: right where any of the graders says so."""

    def judge(pair: tuple[str, tuple[str, ...]]) -> Verdict:
        begun, own = time.perf_counter(), None
        told: list[tuple[str, str]] = []
        for name in graders:
            if name == OURS:
                own = next(_ours([pair], rules, service))
                told.append((own.kind, own.reason))
            else:
                told.append(by_other(name, *pair, service))
        kind, reason = best(told)
        return Verdict(cast("Kind", kind), reason, own.extracted if own else None, time.perf_counter() - begun)

    with ThreadPoolExecutor(2 * service.workers) as threads:
        yield from threads.map(judge, pairs)


def as_fields(verdict: Verdict) -> dict[str, Any]:
    return {
        "verdict": verdict.kind,
        "reason": verdict.reason,
        "extracted": verdict.extracted,
        "seconds": round(verdict.seconds, 6),
    }
