"""The runs of a folder, one line each: state, stage, step, best number, age, size on disk."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

from lemma.core.errors import UserError
from lemma.reports.curves import Curves
from lemma.reports.run_reader import RunReader
from lemma.reports.run_state import State, is_run

# How many levels below the given folder to look for runs.
DEPTH = 3
# The main number of a run, the first of these that it has: its name in metrics.jsonl, its label, whether more is
# better.
JUDGED = (
    ("answer_accuracy", "accuracy", True),
    ("right", "right", True),
    ("reward/mean", "reward", True),
    ("validation/loss", "validation loss", False),
    ("accuracy", "preferred", True),
    ("loss", "loss", False),
)
SHARES = {"accuracy", "right", "preferred"}


@dataclass(frozen=True)
class RunRow:
    """`step` and `total` are those of the last active stage; `age` is in seconds since the last sign of life."""

    folder: Path
    state: State
    stage: str
    step: int
    total: int | None
    best: str
    age: float
    size: int


def find_runs(folder: Path, depth: int = DEPTH) -> Iterator[Path]:
    """Run folders in this one, or this one itself."""
    if is_run(folder):
        yield folder
    elif depth:
        for inner in _inside(folder):
            if inner.is_dir() and not inner.is_symlink() and not inner.name.startswith("."):
                yield from find_runs(inner, depth - 1)


def _inside(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def list_runs(folder: Path) -> list[RunRow]:
    """The newest first."""
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}", fix="name the folder that your runs are in")
    return sorted((_row_or_reason(run) for run in find_runs(folder)), key=lambda row: row.age)


def _row_or_reason(folder: Path) -> RunRow:
    """Its row; of a run that cannot be read, one that says why: the others are shown all the same."""
    try:
        return row_of(folder)
    except (UserError, OSError) as error:
        return RunRow(folder, "unreadable", "", 0, None, str(error), max(0.0, time.time() - _changed(folder)), 0)


def row_of(folder: Path) -> RunRow:
    run = RunReader(folder)
    run.look()
    stage = next((name for name in reversed(run.stages) if (name, "train") in run.metrics.curves), "")
    curves = run.metrics.curves.get((stage, "train"), Curves())
    heard = max((_changed(folder / name) for name in ("metrics.jsonl", "run.log", "run.json")), default=0.0)
    return RunRow(
        folder,
        run.state,
        stage,
        curves.steps[-1] if curves.steps else 0,
        run.log.totals.get(stage),
        best_number(run, stage),
        max(0.0, time.time() - heard),
        size_of(folder),
    )


def best_number(run: RunReader, stage: str) -> str:
    """The best value of the stage's main number, as text; an evaluation takes precedence over training samples."""
    columns = [
        (name, curves.steps, column)
        for axis in ("eval", "train")
        if (curves := run.metrics.curves.get((stage, axis))) is not None
        for name, column in curves.values.items()
    ]
    for wanted, words, more in JUDGED:
        for name, steps, column in columns:
            known = [(value, step) for value, step in zip(column, steps, strict=True) if value is not None]
            if known and (name == wanted or (wanted == "answer_accuracy" and name.endswith("/answer_accuracy"))):
                # Of equal numbers the first counts, as for the best checkpoint.
                value, step = (max if more else min)(known, key=itemgetter(0))
                shown = f"{100 * value:.1f}%" if words in SHARES else f"{value:.4g}"
                return f"{words} {shown} at {step}"
    return ""


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def size_of(path: Path) -> int:
    """Bytes on disk of a file, or of everything in a folder; files removed in the meantime do not count."""
    if not path.is_dir() or path.is_symlink():
        return _bytes(path)
    return sum(_bytes(Path(place) / name) for place, _, names in os.walk(path) for name in names)


def _bytes(path: Path) -> int:
    try:
        return path.lstat().st_blocks * 512
    except OSError:
        return 0


def in_bytes(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:.0f} {unit}" if unit in ("B", "kB") or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError


def in_days(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
