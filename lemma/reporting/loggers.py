"""Several loggers as one sink; a logger that fails is dropped, so that the run continues."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from lemma.core.events import Event, Said
from lemma.reporting.logfile import LogFile


class Logger(Protocol):
    """Takes events until it is closed. `troubles` are its errors that must not end a run."""

    name: str
    troubles: tuple[type[Exception], ...]

    def __call__(self, event: Event) -> None: ...

    def close(self, failed: bool) -> None: ...


class Loggers:
    """Several loggers as one sink, safe to call from any thread. One that fails is dropped, and the others say so."""

    def __init__(self, loggers: Sequence[Logger]):
        self._loggers = list(loggers)
        self._lock = threading.RLock()

    def __call__(self, event: Event) -> None:
        with self._lock:
            for logger in list(self._loggers):
                if logger not in self._loggers:
                    continue
                try:
                    logger(event)
                except logger.troubles as error:
                    self._drop(logger, error)

    def _drop(self, logger: Logger, error: Exception) -> None:
        self._loggers.remove(logger)
        self(Said(f"{logger.name} failed ({error}); the run continues without it", "warning"))

    def note_end(self, error: BaseException) -> None:
        """Write what ended the run to its log; on the console, whoever started it does that."""
        with self._lock, suppress(OSError):
            for logger in self._loggers:
                if isinstance(logger, LogFile):
                    logger.note_end(error)

    def close(self, failed: bool) -> None:
        """Close the loggers, the last one first, so that the console can still report errors."""
        with self._lock:
            while self._loggers:
                logger = self._loggers[-1]
                try:
                    logger.close(failed)
                except logger.troubles as error:
                    self._drop(logger, error)
                else:
                    self._loggers.remove(logger)
