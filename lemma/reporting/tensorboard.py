"""TensorBoard event files: one curve per number, named `<stage>/<train or eval>/<number>`."""

from __future__ import annotations

import threading
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from lemma.core.events import Event, Measured, StageEnded, StageStarted

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard:
    """A folder of event files per stage, because voiding steps after a restart reaches every curve of a folder."""

    name = "TensorBoard"
    troubles: tuple[type[Exception], ...] = (OSError,)

    def __init__(self, folder: Path):
        self._folder = folder
        self._writers: dict[str, SummaryWriter] = {}

    def _open(self, stage: str, step: int) -> SummaryWriter:
        """Start with an event that hides the steps after `step` written by an earlier process."""
        from torch.utils.tensorboard import SummaryWriter

        _silence_writers()
        folder = self._folder / stage
        first_void = None if not folder.exists() else step + 1 if step else 0
        return SummaryWriter(str(folder), purge_step=first_void, flush_secs=10)

    def __call__(self, event: Event) -> None:
        if isinstance(event, StageStarted):
            self._end(event.stage)
            self._writers[event.stage] = self._open(event.stage, event.step)
        elif isinstance(event, Measured) and event.stage in self._writers:
            writer = self._writers[event.stage]
            for name, value in {**event.values, **event.timings}.items():
                writer.add_scalar(f"{event.stage}/{event.axis}/{name}", value, event.step)
        elif isinstance(event, StageEnded):
            self._end(event.stage)

    def _end(self, stage: str) -> None:
        writer = self._writers.pop(stage, None)
        if writer is not None:
            writer.close()

    def close(self, failed: bool) -> None:
        for stage in list(self._writers):
            self._end(stage)


@lru_cache(maxsize=1)
def _silence_writers() -> None:
    """A writer's own thread prints a traceback when the disk is full. The caller gets the error too, and reports it."""
    before = threading.excepthook

    def hear(args: threading.ExceptHookArgs) -> None:
        is_writer = type(args.thread).__module__.startswith("tensorboard.")
        if not (is_writer and isinstance(args.exc_value, OSError)):
            before(args)

    threading.excepthook = hear
