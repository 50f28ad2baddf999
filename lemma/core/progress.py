"""How far work is that may take long, such as reading a million rows, told to whoever listens. Short work is silent."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
Tell = Callable[[str, int, int], None]

# Seconds until anything is told, and between two tellings; items between two looks at the clock.
PATIENCE, BETWEEN, LOOK_EVERY = 0.5, 0.25, 256
_tell: Tell | None = None


@contextmanager
def telling(tell: Tell) -> Iterator[None]:
    """Within `with`, hear what work is done, how much of it, and of how much."""
    global _tell
    before, _tell = _tell, tell
    try:
        yield
    finally:
        _tell = before


def counted(items: Iterable[T], what: str, total: int, done: Callable[[], int] | None = None) -> Iterator[T]:
    """These items. Where that takes a while, tells how many are done, or what `done` says, and the end."""
    next_time, told = time.monotonic() + PATIENCE, False
    for number, item in enumerate(items):
        if number % LOOK_EVERY == 0 and _tell is not None and time.monotonic() >= next_time:
            next_time, told = time.monotonic() + BETWEEN, True
            _tell(what, min(done() if done else number, total - 1), total)
        yield item
    if told and _tell is not None:
        _tell(what, total, total)
