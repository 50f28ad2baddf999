"""Journals as they are read: which files there are, what their rows say, and the episodes of those."""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from gzip import BadGzipFile
from pathlib import Path
from typing import Any

import numpy as np

from lemma.core.errors import UserError
from lemma.core.files import read_json_lines
from lemma.rollouts.episode import Episode, Turn
from lemma.rollouts.journal_rows import ARRAYS, OF_EPISODE, OF_TURN, VERSION

READABLE = (1, VERSION)
# The rows that say which problems a journal is about, and that it ends.
END, DRAWS = "end", "draws"
NEWLINE = 10
COMPRESSED = ".gz"
NAME = re.compile(r"step-(\d+)(?:\.slot-\d+)?\.(jsonl|jsonl\.gz|npz)")


# --- files -------------------------------------------------------------------------------------------------------


def find(path: Path) -> Path | None:
    """The file of a journal, compressed or not."""
    return next((one for one in (path, path.with_name(path.name + COMPRESSED)) if one.is_file()), None)


def step_journals(folder: Path, step: int) -> list[Path]:
    """The journals of one step, in the order of slots."""
    return list_journals(folder.glob(f"step-{step:06d}.*"))


def step_of(path: Path) -> int | None:
    """The step whose journal this is; None where it is none."""
    match = NAME.fullmatch(path.name)
    return None if match is None else int(match[1])


def list_journals(paths: Iterable[Path]) -> list[Path]:
    """The journals among these files, each once and in order."""
    shown = {path for path in paths if not path.name.startswith(".") and path.name.endswith((".jsonl", ".jsonl.gz"))}
    return sorted(path for path in shown if path.suffix != COMPRESSED or path.with_suffix("") not in shown)


def read_bytes(path: Path) -> bytes:
    """What was written, before compression; OSError, EOFError or zlib.error where the file is damaged."""
    data = path.read_bytes()
    return gzip.decompress(data) if path.name.endswith(COMPRESSED) else data


def is_as_written(path: Path, end: Mapping[str, Any]) -> bool:
    """Whether what stands before the row that ends a journal is what stood there when it was written."""
    data = read_bytes(path)
    stop = len(data)
    while stop and data[stop - 1] == NEWLINE:
        stop -= 1
    before = memoryview(data)[: data.rfind(b"\n", 0, stop) + 1]
    return end.get("sha256") == hashlib.sha256(before).hexdigest()


def read_episodes(path: Path) -> Iterator[Episode]:
    """The episodes of one journal, as they were written; its file may have been compressed since."""
    return (row for row in read_rows(find(path) or path) if isinstance(row, Episode))


def drawn_after(folder: Path, step: int, data: str) -> int:
    """One more than the highest number of a problem that journals of later steps, on the same data, were noted to be
    about; 0 if none."""
    later = [path for path in list_journals(folder.glob("step-*")) if (step_of(path) or 0) > step]
    rows = (
        row for path in later for row in _parsed(path) if isinstance(row, dict) and DRAWS in row and row["data"] == data
    )
    return max((draw + 1 for row in rows for draw in row[DRAWS]), default=0)


def read_rows(path: Path) -> Iterator[Episode | dict[str, Any]]:
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


# --- rows --------------------------------------------------------------------------------------------------------


def episode_of(row: Mapping[str, Any]) -> Episode:
    """The episode of a row; KeyError, TypeError or ValueError where it is none."""
    if row.get("version") == 1:
        row = _from_version_1(row)
    values = {name: row[name] for name in OF_EPISODE if name in row}
    values["turns"] = [_turn_of(turn) for turn in row["turns"]]
    if not values["turns"]:
        raise ValueError("there is no turn")
    values |= {"key": tuple(row["key"]), "gold": tuple(row.get("gold", ())), "faults": tuple(row["faults"])}
    if values.get("reward") is not None and not isinstance(values["reward"], int | float):
        raise TypeError("reward is not a number")
    return Episode(**values)


def _turn_of(row: Mapping[str, Any]) -> Turn:
    values = {name: row[name] for name in OF_TURN if name in row}
    for name, kind in ARRAYS.items():
        values[name] = np.frombuffer(base64.b64decode(row[name]), dtype=kind)
    values["versions"] = tuple((int(first), int(version)) for first, version in row["versions"])
    values["seconds"] = row["timings"]["seconds"]
    if len({len(values[name]) for name in ("ids", "logprobs", "kept")}) > 1:
        raise ValueError("ids, logprobs and kept differ in length")
    return Turn(**values)


def _from_version_1(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the journal's first version, which held one completion, as an episode of one turn."""
    turn = {name: row[name] for name in ("ids", "logprobs", "kept", "finish", "given", "text", "timings")}
    turn |= {"context": row["prompt"], "versions": [[0, row["policy_version"]]]}
    return {**row, "turns": [turn]}
