"""The journal: every graded episode on disk before anything is learnt from it or counted.

A step has a file for each slot. Those of finished steps are compressed, and only so many of them stay.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from gzip import BadGzipFile
from pathlib import Path
from typing import Any

from lemma.core.errors import UserError
from lemma.core.faults import fault_point
from lemma.core.files import JsonLines, read_json_lines, write_whole
from lemma.rollouts.episode import Episode
from lemma.rollouts.journal_rows import READABLE, RowWriter, episode_of

END, DRAWS = "end", "draws"
NEWLINE = 10
COMPRESSED = ".gz"
# Tokens and their log-probabilities are close to random: a higher level takes longer and saves next to nothing.
LEVEL = 3
NAME = re.compile(r"step-(\d+)(?:\.slot-\d+)?\.jsonl(\.gz)?")


class Journal:
    """One file of episodes, appended as each is graded. A line is whole or not there.

    `is_complete` once `finish` was called: a step of training reads a complete journal and starts an
    incomplete one again. An evaluation goes on with whatever is there. `data` names what the episodes are about; a
    journal that was completed about something else counts as incomplete, and so does one that was changed afterwards,
    which is `damaged`; both are `is_ended`. A complete one may be compressed. `draws` are the numbers of the problems
    that it was noted to be about.
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
        there = find(path)
        for row in _read(there) if there is not None else ():
            if isinstance(row, Episode):
                self.episodes[row.order] = row
            elif DRAWS in row:
                self.draws += row[DRAWS]
                self.is_ended |= row["data"] != data
            elif there is not None:
                self.is_ended = True
                self.damaged = not _is_as_written(there, row)
                self.is_complete = row.get("data", "") == data and not self.damaged
        if not self.is_complete:
            self._open()

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
        _compressed(self.path).unlink(missing_ok=True)
        self._open().truncate(0)
        self._mark = hashlib.sha256()
        self.episodes, self.draws, self.is_complete = {}, [], False

    def finish(self, drawn: int = 0) -> None:
        """`drawn` is the number of problems that were drawn until then, in all steps."""
        lines, mark = self._open(), self._mark
        if mark is None:
            with open(self.path, "rb") as written:
                mark = hashlib.file_digest(written, "sha256")
        end = {END: True, "episodes": len(self.episodes), "drawn": drawn, "data": self._data}
        lines.append({**end, "sha256": mark.hexdigest()})
        lines.sync()
        self.is_complete = True

    def _open(self) -> JsonLines:
        if self._lines is None:
            self._lines = JsonLines(self.path)
            if not self._lines.size:
                self._mark = hashlib.sha256()
        return self._lines

    def _append(self, lines: Sequence[str]) -> None:
        written = self._open().append_lines(lines)
        if self._mark is not None:
            self._mark.update(written)

    def sync(self) -> None:
        if self._lines is not None:
            self._lines.sync()

    def close(self, *, sync: bool = True) -> None:
        if self._lines is not None:
            self._lines.close(sync=sync)


def _is_as_written(path: Path, end: Mapping[str, Any]) -> bool:
    """Whether what stands before the row that ends a journal is what stood there when it was written."""
    data = read_bytes(path)
    stop = len(data)
    while stop and data[stop - 1] == NEWLINE:
        stop -= 1
    before = memoryview(data)[: data.rfind(b"\n", 0, stop) + 1]
    return end.get("sha256") == hashlib.sha256(before).hexdigest()


def read_episodes(path: Path) -> Iterator[Episode]:
    """The episodes of one journal, as they were written; its file may have been compressed since."""
    return (row for row in _read(find(path) or path) if isinstance(row, Episode))


def drawn_after(folder: Path, step: int, data: str) -> int:
    """One more than the highest number of a problem that journals of later steps, on the same data, were noted to be
    about; 0 if none."""
    later = [path for path in list_journals(folder.glob("step-*")) if (step_of(path) or 0) > step]
    rows = (
        row for path in later for row in _parsed(path) if isinstance(row, dict) and DRAWS in row and row["data"] == data
    )
    return max((draw + 1 for row in rows for draw in row[DRAWS]), default=0)


def _read(path: Path) -> Iterator[Episode | dict[str, Any]]:
    """The episodes of a file, and the rows that say what it is about and that it ends."""
    for number, row in enumerate(_parsed(path), start=1):
        if not isinstance(row, dict):
            raise _broken(path, number, "is not an object")
        if END in row or DRAWS in row:
            yield row
        elif row.get("version") not in READABLE:
            raise UserError(
                f"this row is of no version of the journal that is known here ({' and '.join(map(str, READABLE))})",
                file=path,
                line=number,
                fix="write it with this version of Lemma, or move the file away",
            )
        else:
            yield _episode(row, path, number)


def _episode(row: dict[str, Any], path: Path, number: int) -> Episode:
    try:
        return episode_of(row)
    except KeyError as error:
        raise _broken(path, number, f"lacks {error}") from error
    except (TypeError, ValueError) as error:
        raise _broken(path, number, f"is not an episode ({error})") from error


def _parsed(path: Path) -> Iterator[Any]:
    number = 0
    try:
        for row in read_json_lines(path):
            number += 1
            yield row
    except ValueError as error:
        raise _broken(path, number + 1, f"is not JSON ({error})") from error
    except (EOFError, BadGzipFile, zlib.error) as error:
        raise UserError(f"this compressed journal is damaged ({error})", file=path, fix="move it away") from error


def _broken(path: Path, number: int, what: str) -> UserError:
    return UserError(f"this row of the journal {what}", file=path, line=number, fix="name a journal, or move it away")


# --- the files of a stage ---------------------------------------------------------------------------------


def journal_path(folder: Path, step: int, slot: int | None = None) -> Path:
    """Where a step's journal is written; `find` knows where it is afterwards. Of several slots each has its own."""
    return folder / (f"step-{step:06d}.jsonl" if slot is None else f"step-{step:06d}.slot-{slot:03d}.jsonl")


def step_journals(folder: Path, step: int) -> list[Path]:
    """The journals of one step, in the order of slots."""
    return list_journals(folder.glob(f"step-{step:06d}.*"))


def step_of(path: Path) -> int | None:
    """The step whose journal this is; None where it is none."""
    match = NAME.fullmatch(path.name)
    return None if match is None else int(match[1])


def find(path: Path) -> Path | None:
    """The file of a journal, compressed or not."""
    return next((one for one in (path, _compressed(path)) if one.is_file()), None)


def list_journals(paths: Iterable[Path]) -> list[Path]:
    """The journals among these files, each once and in order."""
    shown = {path for path in paths if not path.name.startswith(".") and path.name.endswith((".jsonl", ".jsonl.gz"))}
    return sorted(path for path in shown if path.suffix != COMPRESSED or path.with_suffix("") not in shown)


def tidy(folder: Path, step: int, keep: int | None, needed_after: int) -> None:
    """Compress the journals up to `step`, and remove those beyond the newest `keep`.

    What was sampled after step `needed_after` stays: a run that goes on from there reads it.
    """
    for torn in folder.glob(".step-*.tmp"):  # of a process that died while it compressed
        torn.unlink()
    for path in sorted(folder.glob("step-*")):
        match = NAME.fullmatch(path.name)
        if match is None or int(match[1]) > step:
            continue
        if keep is not None and int(match[1]) <= min(step - keep, needed_after):
            path.unlink()
        elif match[2] is None:
            write_whole(_compressed(path), gzip.compress(path.read_bytes(), LEVEL, mtime=0))
            fault_point("journal.compressed")
            path.unlink()


def _compressed(path: Path) -> Path:
    return path.with_name(path.name + COMPRESSED)


def read_bytes(path: Path) -> bytes:
    """What was written, before compression; OSError, EOFError or zlib.error where the file is damaged."""
    data = path.read_bytes()
    return gzip.decompress(data) if path.name.endswith(COMPRESSED) else data
