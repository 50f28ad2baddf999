"""Limits on what other people's code may take: computing time of a template, time on the clock of a reward.

Both work in the main thread, where Python hears signals; elsewhere they limit nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType

from lemma.core.errors import Interruption

# Ignored where nobody listens, and used by nobody else: SIGALRM belongs to rewards that limit themselves.
SIGNAL = signal.SIGURG
AGAIN_SECONDS = 1.0


class Overdue(Interruption):
    """A limit has passed."""


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
        self.seconds = seconds
        self._due: float | None = None

    def __enter__(self) -> Stopwatch:
        self._is_on = _is_main()
        if self._is_on:
            before = _guard.watch(self)  # first, since it may fail to start its thread
            self._before = signal.signal(SIGNAL, self._on_signal), before
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_on:
            handler, other = self._before
            _guard.watch(other)
            signal.signal(SIGNAL, handler)

    @property
    def is_running(self) -> bool:
        return self._due is not None

    def begin(self) -> None:
        """A piece of work begins, with a deadline of its own."""
        self._due = time.monotonic() + self.seconds

    def end(self) -> None:
        """It is done."""
        self._due = None

    def fire_if_due(self) -> float:
        """Raise Overdue in the main thread if that is due; seconds until there is something to see again."""
        due = self._due
        left = self.seconds if due is None else due - time.monotonic()
        if left > 0:
            return left
        signal.pthread_kill(threading.main_thread().ident or 0, SIGNAL)
        return AGAIN_SECONDS

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._due is not None and time.monotonic() >= self._due:  # otherwise the piece has ended meanwhile
            raise Overdue


@dataclass(eq=False)
class _Guard:
    """The thread that looks at the clock for all stopwatches, one after the other, as long as the process lives.

    What begins after a look is due no sooner than `seconds` later: the thread is woken only where it would look too
    late for that, and mostly sleeps.
    """

    _changed: threading.Condition = field(default_factory=threading.Condition)
    _thread: threading.Thread | None = None
    _watched: Stopwatch | None = None
    _next_look: float = 0.0

    def watch(self, watch: Stopwatch | None) -> Stopwatch | None:
        """Look after this one from now on; the one before."""
        with self._changed:
            before, self._watched = self._watched, watch
            if watch is not None and self._thread is None:
                thread = threading.Thread(target=self._look, name="deadlines", daemon=True)
                thread.start()
                self._thread = thread
            elif watch is not None and (watch.is_running or time.monotonic() + watch.seconds < self._next_look):
                self._changed.notify()
        return before

    def _look(self) -> None:
        with self._changed:
            while True:
                left = threading.TIMEOUT_MAX if self._watched is None else self._watched.fire_if_due()
                self._next_look = time.monotonic() + left
                self._changed.wait(min(left, threading.TIMEOUT_MAX))


_guard = _Guard()


def _forget() -> None:
    """A process that was forked has no thread but its own."""
    global _guard
    _guard = _Guard()


os.register_at_fork(after_in_child=_forget)
