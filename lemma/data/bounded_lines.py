"""Reading files without filling the memory or hanging: a compressed file of one megabyte may hold a line of
gigabytes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Protocol

from lemma.core.errors import UserError

LONGEST_LINE = 64 * 2**20
LONGEST_LIST = 2**30
"""Size limit of a JSON file that is one list, which is read as a whole."""
CHUNK = 2**20


class Readable(Protocol):
    def read1(self, size: int = -1, /) -> bytes: ...


class BoundedLines(io.BufferedIOBase):
    """A binary file that refuses lines, and whole reads, above a size limit."""

    def __init__(self, inner: Readable, path: Path):
        self._inner, self._path = inner, path
        self._line = 0

    def readable(self) -> bool:
        return True

    def read1(self, size: int = -1, /) -> bytes:
        data = self._inner.read1(size if 0 <= size <= CHUNK else CHUNK)
        end = data.rfind(b"\n")
        self._line = self._line + len(data) if end < 0 else len(data) - end - 1
        if self._line > LONGEST_LINE:
            raise UserError(
                f"a line of this file is longer than {LONGEST_LINE >> 20} MiB",
                file=self._path,
                fix="write one row per line; if it is compressed, check its content",
            )
        return data

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size >= 0:
            return self.read1(size)
        parts, total = [], 0
        while data := self.read1(CHUNK):
            parts.append(data)
            total += len(data)
            if total > LONGEST_LIST:
                raise UserError(
                    f"this file is one list of more than {LONGEST_LIST >> 20} MiB, which is read as a whole",
                    file=self._path,
                    fix="write one object per line, as .jsonl",
                )
        return b"".join(parts)


def check_is_file(path: Path) -> None:
    """Refuse pipes and devices: reading them might wait for a writer, or never end."""
    if path.exists() and not path.is_file():
        raise UserError("this is not a file but a pipe or a device", file=path, fix="write its content to a file first")
