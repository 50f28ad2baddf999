"""`lemma grade`: verdicts on a file of answers."""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lemma.cli.parser import Parser
from lemma.core.errors import UserError, nearest

if TYPE_CHECKING:
    from lemma.grading import GradingService, Rules, Verdict
    from lemma.grading.verdict import Kind

DESCRIPTION = """\
Grade answers: JSON lines {"prediction": ..., "gold": ...} in, the same rows with verdict, reason, extracted and
seconds out. A prediction is a whole completion or a bare answer; a gold is one answer, or a list any of which counts.
The exit code is 0 even when answers are wrong, and 2 where the input cannot be read."""


def add(subparsers: Any) -> None:
    parser: Parser = subparsers.add_parser("grade", help="verdicts on a file of answers", description=DESCRIPTION)
    parser.add_argument("file", metavar="FILE", help="JSON lines, .jsonl or .jsonl.gz; - reads standard input")
    parser.add_argument(
        "--to", dest="output", metavar="FILE", help="file for the graded rows; without it they are printed"
    )
    parser.add_argument(
        "--grader", metavar="NAME", default="lemma", help="lemma, or graders of other systems joined by commas (lemma)"
    )
    parser.add_argument("--prediction", metavar="NAME", default="prediction", help="column of the answers")
    parser.add_argument("--gold", metavar="NAME", default="gold", help="column of the gold answers")
    parser.add_argument("--workers", metavar="N", type=int, default=1, help="worker processes for sympy (1)")
    parser.add_argument("--relative", metavar="R", type=float, default=0.0, help="relative tolerance for numbers (0)")
    parser.add_argument("--absolute", metavar="A", type=float, default=0.0, help="absolute tolerance for numbers (0)")
    parser.add_argument("--whole", action="store_true", help="search the thinking part for an answer as well")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from lemma.evaluation.eval_settings import OURS
    from lemma.evaluation.rescore import check_graders
    from lemma.grading import Rules

    if options.workers < 1:
        raise UserError(f"--workers is {options.workers}", fix="write 1 or more")
    if options.relative < 0 or options.absolute < 0:
        raise UserError("a tolerance is negative", fix="write 0 or more")
    graders = check_graders(options.grader)
    if OURS not in graders and (options.relative or options.absolute or options.whole):
        raise UserError(
            f"--relative, --absolute and --whole are for Lemma's own grader, and {options.grader} has rules of its own",
            fix="leave them out",
        )
    rows = read_rows(options.file)
    pairs = [pair(row, line, options) for line, row in rows]
    rules = Rules(relative=options.relative, absolute=options.absolute, thinking="whole" if options.whole else "after")
    bar = options.output is not None or not sys.stdout.isatty()
    verdicts: list[Verdict] = []
    with output(options.output) as write:
        for (_, row), verdict in zip(rows, grade_all(pairs, rules, options.workers, bar, graders), strict=True):
            write({**row, **as_fields(verdict)})
            verdicts.append(verdict)
    summarise(verdicts)
    return 0


@contextmanager
def output(name: str | None) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Gives a function that writes a row at once. A file is called `.partial` until all rows are in it."""
    if name is None:
        yield _print
        return
    path = Path(name)
    try:
        plain = path.is_file() or not path.exists()
        partial = path.with_name(path.name + ".partial") if plain else path
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "wb", buffering=0) as handle:
            yield lambda row: _write_all(handle, _line(row).encode())
        if plain:
            os.replace(partial, path)
    except OSError as error:
        raise UserError(f"cannot write '{name}': {error.strerror or error}", fix="name another file by --to") from None


def _write_all(handle: FileIO, data: bytes) -> None:
    while data:
        data = data[handle.write(data) :]


def _line(row: dict[str, Any], encoding: str = "utf-8") -> str:
    """A row as JSON; characters that the encoding cannot hold, such as half a surrogate pair, are escaped."""
    text = json.dumps(row, ensure_ascii=False) + "\n"
    try:
        text.encode(encoding)
        return text
    except UnicodeEncodeError:
        return json.dumps(row) + "\n"


def _print(row: dict[str, Any]) -> None:
    sys.stdout.write(_line(row, sys.stdout.encoding or "utf-8"))
    sys.stdout.flush()


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
        if path.suffix == ".gz":
            with gzip.open(path, "rt", encoding="utf-8") as handle:
                yield from handle
        else:
            with open(path, encoding="utf-8") as handle:
                yield from handle
    except UnicodeDecodeError:
        raise UserError("the file is not UTF-8 text", file=name, fix="save it as UTF-8 JSON lines") from None
    except EOFError:
        raise UserError("the compressed file is cut off", file=name, fix="copy it again") from None
    except gzip.BadGzipFile as error:
        if "CRC" in str(error) or "length" in str(error):
            raise UserError("the compressed file is damaged", file=name, fix="copy it again") from None
        raise UserError("the file is not gzip", file=name, fix="name it .jsonl if it is plain text") from None
    except zlib.error:
        raise UserError("the compressed file is damaged", file=name, fix="copy it again") from None
    except (OSError, ValueError) as error:
        raise UserError(f"the file cannot be read ({error})", file=name, fix="name a file that you can read") from None


def pair(row: dict[str, Any], line: int, options: argparse.Namespace) -> tuple[str, tuple[str, ...]]:
    """The prediction and the golds of a row."""
    for column in (options.prediction, options.gold):
        if column not in row:
            raise UserError(
                f"the row has no '{column}'",
                file=options.file,
                line=line,
                fix=f"name the columns by --prediction and --gold; {nearest(column, row)}",
            )
    prediction, gold = row[options.prediction], row[options.gold]
    golds = gold if isinstance(gold, list) else [gold]
    for column, values in ((options.prediction, [prediction]), (options.gold, golds)):
        for value in values:
            if value is not None and not isinstance(value, str | int | float):
                raise UserError(
                    f"'{column}' is not text", file=options.file, line=line, fix="write a string or a number"
                )
    return _text(prediction), tuple(_text(one) for one in golds)


def _text(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)


def grade_all(
    pairs: Sequence[tuple[str, tuple[str, ...]]],
    rules: Rules,
    workers: int,
    bar: bool = True,
    graders: Sequence[str] = ("lemma",),
) -> Iterator[Verdict]:
    """Verdicts in the order of the rows, as they come, with a bar on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from lemma.grading import GradingService

    columns = (TextColumn("grading"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    shown = Progress(*columns, console=Console(stderr=True), redirect_stdout=False, disable=not bar)
    with GradingService(workers) as service, shown as progress:
        task = progress.add_task("grading", total=len(pairs))
        is_ours = list(graders) == ["lemma"]
        for verdict in _ours(pairs, rules, service) if is_ours else _by(graders, pairs, rules, service):
            progress.advance(task)
            yield verdict


def _ours(pairs: Sequence[tuple[str, tuple[str, ...]]], rules: Rules, service: GradingService) -> Iterator[Verdict]:
    from lemma.grading.verdict import best_of

    answers = service.stream(((prediction, gold) for prediction, golds in pairs for gold in golds or ("",)), rules)
    for _, golds in pairs:
        yield best_of([next(answers) for _ in golds or ("",)])


def _by(
    graders: Sequence[str], pairs: Sequence[tuple[str, tuple[str, ...]]], rules: Rules, service: GradingService
) -> Iterator[Verdict]:
    """As `lemma eval --grader`: right where any of the graders says so."""
    from lemma.evaluation.rescore import best, by_other
    from lemma.grading import Verdict

    def judge(pair: tuple[str, tuple[str, ...]]) -> Verdict:
        begun, own = time.perf_counter(), None
        told: list[tuple[str, str]] = []
        for name in graders:
            if name == "lemma":
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


def summarise(verdicts: Sequence[Verdict]) -> None:
    """A table of verdicts and their reasons, on standard error, so that rows can be piped on."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{len(verdicts)} answers")
    for heading, justify in (("verdict", "left"), ("reason", "left"), ("answers", "right"), ("share", "right")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for kind in ("right", "wrong", "unknown"):
        chosen = Counter(verdict.reason for verdict in verdicts if verdict.kind == kind)
        total = sum(chosen.values())
        table.add_row(kind, "", str(total), f"{total / len(verdicts):.1%}", style="bold")
        for reason, count in chosen.most_common():
            table.add_row("", reason, str(count), f"{count / len(verdicts):.1%}")
    Console(stderr=True).print(table)
