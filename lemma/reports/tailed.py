"""A growing text file: each read returns only new lines."""

from __future__ import annotations

import os
from pathlib import Path

# Bytes before the position read to; if they have changed, the file was rewritten.
MARK = 256


class TailedFile:
    """`look` returns the complete lines added since the last call.

    A run that resumes from a checkpoint truncates its metrics and writes them again: then `look` starts over, and
    `rewritten` is incremented.
    """

    def __init__(self, path: Path):
        self.path = path
        self.rewritten = 0
        self._place = 0
        self._mark = b""

    def look(self) -> list[bytes]:
        try:
            handle = open(self.path, "rb")
        except OSError:
            return []
        with handle:
            if not self._is_same(handle.fileno()):
                self.rewritten += 1
                self._place, self._mark = 0, b""
            handle.seek(self._place)
            data = handle.read()
        whole = data[: data.rfind(b"\n") + 1]
        if whole:
            self._place += len(whole)
            self._mark = (self._mark + whole)[-MARK:]
        return whole.splitlines()

    def _is_same(self, handle: int) -> bool:
        if os.fstat(handle).st_size < self._place:
            return False
        return os.pread(handle, len(self._mark), self._place - len(self._mark)) == self._mark
