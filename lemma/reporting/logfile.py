"""`run.log`: every event as a line with its time, appended as it happens."""

from __future__ import annotations

import io
import os
import traceback
from datetime import datetime
from pathlib import Path
from typing import TextIO

from lemma.core.errors import UserError
from lemma.core.events import Awaited, Event, Progressed, Said
from lemma.core.files import detach
from lemma.reporting.console import describe


class LogFile:
    """An append-only text file, opened by the first event and flushed after each line."""

    name = "run.log"
    troubles: tuple[type[Exception], ...] = (OSError,)

    def __init__(self, path: Path):
        self._path = path
        self._handle: TextIO | None = None

    def _open(self) -> TextIO:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        detach(self._path)
        handle = open(self._path, "a+b")
        if handle.tell() > 0:
            handle.seek(-1, os.SEEK_END)
            if handle.read(1) != b"\n":
                handle.write(b"\n")
        return io.TextIOWrapper(handle, encoding="utf-8")

    def __call__(self, event: Event) -> None:
        if isinstance(event, Progressed) and event.done < event.total:
            return
        if isinstance(event, Awaited) and not event.what:
            return
        if self._handle is None:
            self._handle = self._open()
        level = event.level if isinstance(event, Said) else "info"
        text = describe(event).replace("\n", "\n    ")
        self._handle.write(f"{datetime.now():%Y-%m-%d %H:%M:%S} {level:<7} {text}\n")
        self._handle.flush()

    def note_end(self, error: BaseException) -> None:
        """Write what ended the run. A run that ended before its first event has no log, and gets none."""
        if self._handle is None or not isinstance(error, Exception | KeyboardInterrupt):
            return
        if isinstance(error, UserError):
            text = str(error)
        elif isinstance(error, KeyboardInterrupt):
            text = "interrupted"
        else:
            text = "".join(traceback.format_exception(error)).rstrip()
        self(Said(text, "error"))

    def close(self, failed: bool) -> None:
        if self._handle is not None:
            self._handle.close()
