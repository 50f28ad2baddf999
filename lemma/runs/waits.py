"""What a stage waits for, as it is told to the outside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lemma.core.events import Awaited, Sink


class Waits:
    """Waits of one stage. One may begin within another, which goes on when the inner one has ended."""

    def __init__(self, stage: str, sink: Sink):
        self._stage, self._sink = stage, sink
        self.now: list[str] = []  # the innermost last

    def begin(self, what: str) -> None:
        self.now.append(what)
        self._sink(Awaited(self._stage, what))

    @contextmanager
    def within(self, what: str) -> Iterator[None]:
        self.begin(what)
        yield
        del self.now[-1:]
        self._sink(Awaited(self._stage, *self.now[-1:]))

    def end_all(self) -> None:
        """A step is done: nothing is waited for any more."""
        self.now = []
        self._sink(Awaited(self._stage))
