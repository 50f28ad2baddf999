"""`lemma runs clean`: which files of old runs can be deleted without losing a model or the ability to resume."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lemma.core.errors import UserError, warn
from lemma.learning.checkpoint import CheckpointStore
from lemma.reports.run_reader import RunReader
from lemma.reports.run_state import is_locked
from lemma.reports.run_table import find_runs, size_of
from lemma.reports.shown_samples import journal_steps
from lemma.rollouts.journal_reader import step_journals
from lemma.rollouts.token_notes import NOTES, notes_path
from lemma.runs.run_folder import RunFolder, refuse_links


@dataclass(frozen=True)
class Spare:
    """Files of one kind in one run that are no longer needed."""

    run: Path
    kind: str
    paths: tuple[Path, ...]
    size: int


def find_spare(folder: Path) -> list[Spare]:
    """Of every run that nobody works on: checkpoints, but the best and, of a stage that is not finished, the newest;
    the journals of steps that no run will go back to, and what their updates noted."""
    spare: list[Spare] = []
    for run in find_runs(folder):
        try:
            refuse_links(run)
            if is_locked(run):
                continue
            found = _spare_of(RunReader(run))
        except (UserError, OSError, ValueError, KeyError, TypeError) as error:
            warn(f"{run} is left as it is: {error}")
            continue
        for kind, paths in found.items():
            size = sum(map(size_of, paths))
            if paths:
                spare.append(Spare(run, kind, tuple(paths), size))
    return spare


def _spare_of(run: RunReader) -> dict[str, list[Path]]:
    checkpoints: list[Path] = []
    journals: list[Path] = []
    notes: list[Path] = []
    for stage in run.stages:
        place = run.folder / "stages" / stage / "checkpoints"
        steps = {int(path.name[5:]): path for path in place.glob("step-*") if path.name[5:].isdecimal()}
        best = CheckpointStore(place, 1, lambda text: None).best() if steps else None
        done, newest = run.is_done(stage), max(steps, default=0)
        kept = {newest if not done else -1, best["step"] if best else -1}
        checkpoints += [path for step, path in sorted(steps.items()) if step not in kept]
        for step, first in journal_steps(run.folder, stage).items():
            if done or step <= newest:
                journals += step_journals(first.parent, step)
                notes.append(notes_path(first.parent.with_name(NOTES), step))
    known = [path for path in notes if path.is_file()]
    return {"checkpoints": checkpoints, "journals": journals, "notes of updates": known}


def remove(spare: Sequence[Spare]) -> int:
    """Remove these; returns the bytes freed. A run that has been started in the meantime is refused by its lock."""
    for one in spare:
        folder = RunFolder(one.run)
        try:
            for path in one.paths:
                folder.remove(path)
        finally:
            folder.close()
    return sum(one.size for one in spare)
