"""`run.log`: every event as a line with its time, appended as it happens."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path

from lemma.core.events import Event, Progressed, Said
from lemma.reporting.text import describe


class LogFile:
    """An append-only text file; each line is on its way to the disk before the next event is taken."""

    name = "run.log"
    troubles: tuple[type[Exception], ...] = (OSError,)

    def __init__(self, path: Path):
        self._handle = open(path, "a", encoding="utf-8")
        if self._ends_torn(path):
            self._handle.write("\n")

    @staticmethod
    def _ends_torn(path: Path) -> bool:
        if path.stat().st_size == 0:
            return False
        with open(path, "rb") as handle:
            handle.seek(-1, os.SEEK_END)
            return handle.read(1) != b"\n"

    def __call__(self, event: Event) -> None:
        if isinstance(event, Progressed) and event.done < event.total:
            return
        level = event.level if isinstance(event, Said) else "info"
        text = describe(event).replace("\n", "\n    ")
        self._handle.write(f"{datetime.now():%Y-%m-%d %H:%M:%S} {level:<7} {text}\n")
        self._handle.flush()

    def close(self, failed: bool) -> None:
        self._handle.close()
