"""Small work with files, done in a thread beside the work that people wait for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType


class Beside:
    """One piece of work at a time: who brings the next one waits for the last. What went wrong is raised there, or
    where `with` is left."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="beside")
        self._last: Future[None] | None = None

    def do(self, work: Callable[[], None]) -> None:
        self.settle()
        self._last = self._thread.submit(work)

    def settle(self) -> None:
        """Wait for the last piece."""
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def __enter__(self) -> Beside:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._thread.shutdown()
        if kind is None:
            self.settle()
