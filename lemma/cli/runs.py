"""`lemma runs [FOLDER]`: a table of runs; `lemma runs clean [FOLDER]`: give disk space back."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lemma.cli.parser import Parser
from lemma.core.errors import UserError
from lemma.core.terminal import unescaped, visible

DESCRIPTION = """\
List the runs in a folder (default: runs) with their state, stage, step, best number, age and size on disk.

`lemma runs clean` removes, where you confirm it, what finished and old runs no longer need: checkpoints other than the
best (and the newest, where a stage is not finished), and journals of steps that are past. Models, metrics, logs
and evaluations stay."""


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    parser = subparsers.add_parser("runs", help="a table of runs", description=DESCRIPTION)
    parser.add_argument("words", metavar="[clean] [FOLDER]", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--yes", action="store_true", help="clean: remove everything that is listed, without asking")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    words: list[str] = args.words
    cleaning = words[:1] == ["clean"]
    folders = words[1:] if cleaning else words
    if len(folders) > 1:
        raise UserError("`lemma runs` takes one folder", fix="name the folder that holds your runs")
    folder = Path(folders[0]) if folders else Path("runs")
    return _clean(folder, args.yes) if cleaning else _list(folder)


def _list(folder: Path) -> int:
    from rich.console import Console
    from rich.table import Table

    from lemma.reports.run_table import in_bytes, in_days, list_runs

    rows = list_runs(folder)
    if not rows:
        print(f"there is no run in {folder}")
        return 0
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("run", "state", "stage", "step", "best", "age", "size"):
        table.add_column(name, justify="right" if name in ("step", "age", "size") else "left", overflow="fold")
    for row in rows:
        step = f"{row.step} of {row.total}" if row.total else str(row.step or "")
        name = str(row.folder.relative_to(folder)) if row.folder != folder else str(row.folder)
        cells = (name, row.state, row.stage, step, row.best, in_days(row.age), in_bytes(row.size))
        table.add_row(*map(visible, cells))
    width = None if sys.stdout.isatty() else 160
    Console(file=unescaped(sys.stdout), markup=False, highlight=False, width=width).print(table)
    return 0


def _clean(folder: Path, yes: bool) -> int:
    from lemma.reports.run_cleaning import Spare, find_spare, remove
    from lemma.reports.run_table import in_bytes

    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}", fix="name the folder that your runs are in")
    chosen: list[Spare] = []
    spare = find_spare(folder)
    if not spare:
        print("there is nothing to remove")
        return 0
    for one in spare:
        # `input` writes to the terminal by itself.
        words = visible(f"{one.run}: {len(one.paths)} {one.kind}, {in_bytes(one.size)}")
        if yes or not sys.stdin.isatty():
            print(words)
        elif input(f"{words}; remove? [y/N] ").strip().lower() not in ("y", "yes"):
            continue
        chosen.append(one)
    if not yes and not sys.stdin.isatty():
        print("nothing was removed; write --yes to remove all of it")
        return 0
    print(f"freed {in_bytes(remove(chosen))}")
    return 0
