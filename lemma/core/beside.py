"""Small work with files, done in a thread beside the work that people wait for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType


class Beside:
    """Pieces of work, one after the other and in order. What goes wrong is raised where they are waited for:
    by `settle`, or where `with` is left."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="beside")
        self._begun: list[Future[None]] = []

    def do(self, work: Callable[[], None]) -> None:
        self._begun.append(self._thread.submit(work))

    def settle(self) -> None:
        """Wait for all pieces."""
        begun, self._begun = self._begun, []
        wait(begun)
        for piece in begun:
            piece.result()

    def __enter__(self) -> Beside:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._thread.shutdown()
        if kind is None:
            self.settle()
