"""`lemma grade`: verdicts on a file of answers."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lemma.cli.parser import Parser
from lemma.core.errors import UserError

if TYPE_CHECKING:
    from lemma.grading import Verdict

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
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from lemma.evaluation.answer_file import as_fields, grade_all, output, pair, read_rows
    from lemma.evaluation.eval_settings import OURS, check_graders
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
    columns = (options.prediction, options.gold)
    pairs = [pair(row, line, columns, options.file) for line, row in rows]
    rules = Rules(relative=options.relative, absolute=options.absolute, thinking="whole" if options.whole else "after")
    bar = options.output is not None or not sys.stdout.isatty()
    parts = (TextColumn("grading"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    progress = Progress(*parts, console=Console(stderr=True), redirect_stdout=False, disable=not bar)
    verdicts: list[Verdict] = []
    with output(options.output) as write, progress:
        task = progress.add_task("grading", total=len(pairs))
        for (_, row), verdict in zip(rows, grade_all(pairs, rules, options.workers, graders), strict=True):
            progress.advance(task)
            write({**row, **as_fields(verdict)})
            verdicts.append(verdict)
    _summarise(verdicts)
    return 0


def _summarise(verdicts: Sequence[Verdict]) -> None:
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
