"""Limits on what other people's code may take: computing time of a template, time on the clock of a reward.

Both work in the main thread, where Python hears signals; elsewhere they limit nothing.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

# Ignored where nobody listens, and used by nobody else: SIGALRM belongs to rewards that limit themselves.
SIGNAL = signal.SIGURG
AGAIN_SECONDS = 1.0


class Overdue(BaseException):
    """A limit has passed. Not an Exception: code that forgives every error must not forgive this one."""


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


def _raise(number: int, frame: FrameType | None) -> None:
    raise Overdue


@contextlib.contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Within `with`, raise Overdue after so much computing of this process; time spent waiting does not count."""
    if not _is_main():
        yield
        return
    before = signal.signal(signal.SIGVTALRM, _raise)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


class Stopwatch:
    """Raises Overdue in the main thread when one piece of work takes longer than `seconds`, also while it waits.

    A second thread looks at the clock. What never returns to Python, such as a loop in C, is not interrupted.
    """

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._due: float | None = None
        self._changed = threading.Condition()
        self._is_over = False

    def __enter__(self) -> Stopwatch:
        self._is_on = _is_main()
        if self._is_on:
            self._before = signal.signal(SIGNAL, self._hear)
            self._thread = threading.Thread(target=self._look, name="deadline", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_on:
            with self._changed:
                self._is_over = True
                self._changed.notify()
            self._thread.join()
            signal.signal(SIGNAL, self._before)

    def begin(self) -> None:
        """A piece of work begins, with a deadline of its own."""
        self._due = time.monotonic() + self._seconds

    def end(self) -> None:
        """It is done."""
        self._due = None

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self._due is not None and time.monotonic() >= self._due:  # otherwise the piece has ended meanwhile
            raise Overdue

    def _look(self) -> None:
        """What begins after a look is due no sooner than `seconds` later: nobody need say that it has begun."""
        with self._changed:
            while not self._is_over:
                due = self._due
                left = self._seconds if due is None else due - time.monotonic()
                if left <= 0:
                    signal.pthread_kill(threading.main_thread().ident or 0, SIGNAL)
                    left = AGAIN_SECONDS
                self._changed.wait(min(left, threading.TIMEOUT_MAX))
