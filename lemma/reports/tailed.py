"""A file of lines that grows: each look reads only what is new."""

from __future__ import annotations

import os
from pathlib import Path

# Bytes in front of the place that was read to; where they are no longer the same, the file was written anew.
MARK = 256


class TailedFile:
    """`look` gives the whole lines that came since the last one.

    A run that goes on from a checkpoint cuts its metrics and writes them again: then `look` begins at the start, and
    `rewritten` counts up.
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
