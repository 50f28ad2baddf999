"""The journal: every graded episode on disk before anything is learnt from it or counted.

A step has a file for each slot. Those of finished steps are compressed, and only so many of them stay.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lemma.core.faults import fault_point
from lemma.core.files import JsonLines, write_whole
from lemma.rollouts.episode import Episode
from lemma.rollouts.journal_reader import COMPRESSED, DRAWS, END, NAME, find, is_as_written, read_rows
from lemma.rollouts.journal_rows import RowWriter
from lemma.rollouts.token_notes import NOTES

# Tokens and their log-probabilities are close to random: a higher level takes longer and saves next to nothing.
LEVEL = 3


class Journal:
    """One file of episodes, appended as each is graded. A line is whole or not there.

    `is_complete` once `finish` was called: a step of training reads a complete journal and starts an
    incomplete one again. An evaluation goes on with whatever is there. `data` names what the episodes are about; a
    journal that was completed about something else counts as incomplete, and so does one that was changed afterwards,
    which is `damaged`; both are `is_ended`. A complete one may be compressed. `draws` are the numbers of the problems
    that it was noted to be about. `is_new` if there was no file.
    """

    def __init__(self, path: Path, data: str = ""):
        self.path, self._data = path, data
        self.episodes: dict[tuple[str, int], Episode] = {}
        self.draws: list[int] = []
        self.is_complete = self.damaged = self.is_ended = False
        self._lines: JsonLines | None = None
        # Running SHA-256 of the file; None where an earlier process wrote part of it.
        self._mark: Any = None
        self._rows = RowWriter()
        self.is_new = not (path.is_file() or path.with_name(path.name + COMPRESSED).is_file())
        if not self.is_new:
            self._read()
        if not self.is_complete:
            self._lines = JsonLines(path)
        if self.is_new:
            self._mark = hashlib.sha256()

    def _read(self) -> None:
        there = find(self.path) or self.path
        for row in read_rows(there):
            if isinstance(row, Episode):
                self.episodes[row.order] = row
            elif DRAWS in row:
                self.draws += row[DRAWS]
                self.is_ended |= row["data"] != self._data
            else:
                self.is_ended = True
                self.damaged = not is_as_written(there, row)
                self.is_complete = row.get("data", "") == self._data and not self.damaged

    def append(self, *episodes: Episode) -> None:
        if not episodes:
            return
        assert not self.is_complete, "a complete journal does not grow"
        self.episodes |= {episode.order: episode for episode in episodes}
        self._append([self._rows.line(episode) for episode in episodes])

    def note_draws(self, draws: Sequence[int]) -> None:
        """Which problems it is about, before any of them is played."""
        self.draws += draws
        self._append([json.dumps({DRAWS: list(draws), "data": self._data}, ensure_ascii=False)])

    def clear(self) -> None:
        self.path.with_name(self.path.name + COMPRESSED).unlink(missing_ok=True)
        self._lines = self._lines or JsonLines(self.path)
        self._lines.truncate(0)
        self._mark = hashlib.sha256()
        self.episodes, self.draws, self.is_complete = {}, [], False

    def finish(self, drawn: int = 0) -> None:
        """`drawn` is the number of problems that were drawn until then, in all steps."""
        lines, mark = self._lines, self._mark
        assert lines is not None, "it is complete"
        if mark is None:
            with open(self.path, "rb") as written:
                mark = hashlib.file_digest(written, "sha256")
        end = {END: True, "episodes": len(self.episodes), "drawn": drawn, "data": self._data}
        lines.append({**end, "sha256": mark.hexdigest()})
        lines.sync()
        self.is_complete = True

    def _append(self, lines: Sequence[str]) -> None:
        assert self._lines is not None, "it is complete"
        written = self._lines.append_lines(lines)
        if self._mark is not None:
            self._mark.update(written)

    def sync(self) -> None:
        if self._lines is not None:
            self._lines.sync()

    def close(self, *, sync: bool = True) -> None:
        if self._lines is not None:
            self._lines.close(sync=sync)


def journal_path(folder: Path, step: int, slot: int | None = None) -> Path:
    """Where a step's journal is written; of several slots each has its own. `journal_reader.find` knows where it is
    afterwards."""
    return folder / (f"step-{step:06d}.jsonl" if slot is None else f"step-{step:06d}.slot-{slot:03d}.jsonl")


def tidy(folder: Path, step: int, keep: int | None, needed_after: int) -> None:
    """Compress the journals up to `step`, and remove those beyond the newest `keep`, with the notes on their tokens.

    What was sampled after step `needed_after` stays: a run that goes on from there reads it.
    """
    both = (folder, folder.with_name(NOTES))
    for torn in (path for one in both for path in one.glob(".step-*.tmp")):  # of a process that died meanwhile
        torn.unlink()
    for path in sorted(path for one in both for path in one.glob("step-*")):
        match = NAME.fullmatch(path.name)
        if match is None or int(match[1]) > step:
            continue
        if keep is not None and int(match[1]) <= min(step - keep, needed_after):
            path.unlink()
        elif match[2] == "jsonl":
            write_whole(path.with_name(path.name + COMPRESSED), gzip.compress(path.read_bytes(), LEVEL, mtime=0))
            fault_point("journal.compressed")
            path.unlink()
