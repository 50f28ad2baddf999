"""The thread that samples while the learner works."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

from lemma.core.ranks import aside
from lemma.core.thread_gpu import gpu_of_thread, use_gpu


class SamplingThread:
    """One thread for all steps: workers of graders and environments do not outlive the thread that starts them. Rewards
    run in it, on the GPU of the thread that made it."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, args=(gpu_of_thread(),), name="sampling ahead", daemon=True)
        self._thread.start()

    def begin(self, work: Callable[[], None]) -> Future[None]:
        """Run this in the thread; asking for the result waits for it, and re-raises its exception."""
        future: Future[None] = Future()
        self._tasks.put((work, future))
        return future

    def end(self, seconds: float | None = None) -> None:
        """End after what was begun, and wait for that, at most so many seconds."""
        self._tasks.put(None)
        self._thread.join(seconds)

    def _work(self, gpu: int | None) -> None:
        use_gpu(gpu)
        while (task := self._tasks.get()) is not None:
            work, future = task
            try:
                with aside():
                    work()
                future.set_result(None)
            except BaseException as error:  # noqa: BLE001 (raised again by the thread that waits)
                future.set_exception(error)
