"""The sink of a run: hands each event to every logger, and loses a logger rather than the run."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from lemma.core.errors import warnings_said
from lemma.core.events import Event, Said, Sink
from lemma.reporting.console import Console
from lemma.reporting.logfile import LogFile
from lemma.reporting.tensorboard import TensorBoard
from lemma.reporting.wandb import WeightsAndBiases


class Logger(Protocol):
    """Takes events until it is closed. `troubles` are the errors of its own that may not end a run."""

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
        self(Said(f"{logger.name} failed ({error}); the run goes on without it", "warning"))

    def close(self, failed: bool) -> None:
        """Close the loggers, the last one first: the console stays to hear about trouble."""
        with self._lock:
            while self._loggers:
                logger = self._loggers[-1]
                try:
                    logger.close(failed)
                except logger.troubles as error:
                    self._drop(logger, error)
                else:
                    self._loggers.remove(logger)


@contextmanager
def make_sink(
    run_dir: Path, *, tensorboard: bool, wandb: str | None, recipe: Mapping[str, Any], console: bool = True
) -> Iterator[Sink]:
    """The sink of a run in `run_dir`, open until the block ends. `wandb` is the name of a project, or none.

    Nothing is written before the first event: until then the folder may be locked, cleared or refused.
    """
    loggers: list[Logger] = [Console()] if console else []
    loggers.append(LogFile(run_dir / "run.log"))
    if tensorboard:
        loggers.append(TensorBoard(run_dir / "tensorboard"))
    if wandb is not None:
        loggers.append(WeightsAndBiases(run_dir, wandb, recipe, say=lambda text: sink(Said(text))))
    sink = Loggers(loggers)
    failed = True
    try:
        with warnings_said(lambda text: sink(Said(text, "warning"))):
            yield sink
        failed = False
    finally:
        sink.close(failed)
