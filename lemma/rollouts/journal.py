"""The journal: every graded sample on disk before anything is learnt from it or counted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lemma.core.errors import UserError
from lemma.core.files import JsonLines, read_json_lines
from lemma.rollouts.sample import VERSION, Sample

END = "end"


class Journal:
    """One file of samples, appended as each is graded. A line is whole or not there.

    `is_complete` once `finish` was called: a step of training reads a complete journal and starts an
    incomplete one again. An evaluation goes on with whatever is there. `data` names what the samples are about; a
    journal that was completed about something else counts as incomplete.
    """

    def __init__(self, path: Path, data: str = ""):
        self.path, self._data = path, data
        self.samples: dict[tuple[str, int], Sample] = {}
        self.is_complete = False
        if path.is_file():
            for found in _read(path):
                if isinstance(found, Sample):
                    self.samples[found.order] = found
                else:
                    self.is_complete = found.get("data", "") == data
        self._lines = JsonLines(path)

    def append(self, sample: Sample, extra: Mapping[str, Any] | None = None) -> None:
        """`extra` are columns for readers of the file, such as the prompt and the gold in words."""
        assert not self.is_complete, "a complete journal does not grow"
        self.samples[sample.order] = sample
        self._lines.append({"version": VERSION, **sample.to_row(), **(extra or {})})

    def clear(self) -> None:
        self._lines.truncate(0)
        self.samples, self.is_complete = {}, False

    def finish(self) -> None:
        self._lines.append({END: True, "samples": len(self.samples), "data": self._data})
        self._lines.sync()
        self.is_complete = True

    def sync(self) -> None:
        self._lines.sync()

    def close(self) -> None:
        self._lines.close()


def read_samples(path: Path) -> Iterator[Sample]:
    """The samples of one journal file, as they were written."""
    return (found for found in _read(path) if isinstance(found, Sample))


def _read(path: Path) -> Iterator[Sample | dict[str, Any]]:
    """The samples of a file, and the row that ends it."""
    for number, row in enumerate(_parsed(path), start=1):
        if not isinstance(row, dict):
            raise _broken(path, number, "is not an object")
        if END in row:
            yield row
        elif row.get("version") != VERSION:
            raise UserError(
                f"this row is not of version {VERSION} of the journal",
                file=path,
                line=number,
                fix="write it with this version of Lemma, or move the file away",
            )
        else:
            yield _sample(row, path, number)


def _sample(row: dict[str, Any], path: Path, number: int) -> Sample:
    try:
        return Sample.from_row(row)
    except KeyError as error:
        raise _broken(path, number, f"lacks {error}") from error
    except (TypeError, ValueError) as error:
        raise _broken(path, number, f"is not a sample ({error})") from error


def _parsed(path: Path) -> Iterator[Any]:
    number = 0
    try:
        for row in read_json_lines(path):
            number += 1
            yield row
    except ValueError as error:
        raise _broken(path, number + 1, f"is not JSON ({error})") from error


def _broken(path: Path, number: int, what: str) -> UserError:
    return UserError(f"this row of the journal {what}", file=path, line=number, fix="name a journal, or move it away")
