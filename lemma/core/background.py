"""Small file operations in a background thread, off the critical path."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType


class BackgroundWork:
    """Tasks that run one at a time, in the order submitted. A task's exception is raised by the next `wait`, or at the
    end of the `with` block."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="background")
        self._pending: list[Future[None]] = []

    def submit(self, task: Callable[[], None]) -> None:
        self._pending.append(self._thread.submit(task))

    def wait(self) -> None:
        """Wait for all tasks submitted so far."""
        pending, self._pending = self._pending, []
        wait(pending)
        for future in pending:
            future.result()

    def __enter__(self) -> BackgroundWork:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._thread.shutdown()
        if kind is None:
            self.wait()
