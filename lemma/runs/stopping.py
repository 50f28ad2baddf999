"""Stopping a run cleanly: what SIGTERM and Ctrl-C do, and when."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from lemma.core.errors import Interruption
from lemma.core.ranks import gather_over_ranks, may_leave


class Stopped(Exception):
    """The run was asked to stop, has finished its step and saved."""


class StopNow(Interruption):
    """The run was asked to stop during something that a later start repeats."""


class StopSignal:
    """SIGTERM and Ctrl-C ask for a stop at the end of the step; a second Ctrl-C stops at once, a third even without
    cleaning up: what is on disk survives that."""

    def __init__(self) -> None:
        self.asked = False
        self._is_at_once = False

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Context in which a stop does not wait for the end of the step: it raises StopNow, on all ranks."""
        if self.is_agreed():
            raise StopNow
        self._is_at_once = True
        try:
            yield
        finally:
            self._is_at_once = False

    def is_agreed(self) -> bool:
        """Whether any rank was asked to stop; all ranks get the same answer."""
        return any(gather_over_ranks(self.asked, "whether to stop"))

    @contextmanager
    def listening(self) -> Iterator[StopSignal]:
        try:
            before = {number: signal.signal(number, self._ask) for number in (signal.SIGTERM, signal.SIGINT)}
        except ValueError:  # only the main thread receives signals
            before = {}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            signal.signal(signal.SIGINT, _leave)
            raise KeyboardInterrupt
        first = not self.asked
        what = b"breaking off the evaluation" if self._is_at_once else b"finishing this step"
        if sys.__stderr__ is not None:  # otherwise descriptor 2 may be any file
            with suppress(OSError):  # the reader is gone
                os.write(2, b"\nlemma: " + what + b", then saving; Ctrl-C again stops at once\n")
        self.asked = True  # after the message: another signal may arrive between any two lines of this handler
        if self._is_at_once and first and may_leave():
            raise StopNow


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)
