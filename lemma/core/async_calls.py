"""Calls of other people's functions, plain or `async`, from any thread.

Everything `async` runs on one event loop in a background thread. A client or a semaphore that a user's module keeps
belongs to the loop on which it was first used, so there must not be a new loop for each call. It computes on the GPU of
whoever calls.
"""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeAlias

from lemma.core.deadlines import Overdue
from lemma.core.thread_gpu import gpu_of_thread, use_gpu

if TYPE_CHECKING:
    import asyncio
    from concurrent.futures import Future


Ended: TypeAlias = "Generator[tuple[int, Future[Any]], None, None]"


@dataclass(eq=False)
class Caller:
    """Calls functions and waits for those that are `async`, on an event loop of its own."""

    _loop: asyncio.AbstractEventLoop | None = None
    _thread: threading.Thread | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def call(self, function: Callable[..., Any], *arguments: Any, seconds: float | None = None) -> Any:
        """What the function returns. An `async` one that takes longer than `seconds` is cancelled: `TimeoutError`."""
        return self.result(function(*arguments), seconds)

    def result(self, given: Any, seconds: float | None = None, late: type[BaseException] = TimeoutError) -> Any:
        """`given` itself, or the result of awaiting it; `late` after `seconds`."""
        if not inspect.isawaitable(given):
            return given
        import asyncio

        loop = self._running()
        if threading.current_thread() is self._thread:
            if inspect.iscoroutine(given):
                given.close()  # otherwise Python complains that it was never awaited
            raise RuntimeError("this is called on the event loop, which cannot wait for itself: await it there")
        future = asyncio.run_coroutine_threadsafe(_awaited(given, gpu_of_thread()), loop)
        try:
            return future.result(seconds)
        except TimeoutError:
            if future.done():
                raise
        except BaseException:
            future.cancel()  # no effect where it has ended by itself: this is for deadlines and Ctrl-C
            raise
        # A loop that is held up cannot cancel anything, and no call on it is to blame: whoever watches ends all.
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result()
        future.cancel()
        raise late(f"the call took longer than {seconds:g} s")

    def as_they_end(self, given: Sequence[Awaitable[Any]], seconds: float | None) -> Ended:
        """Await all of them at once: the place and the outcome of each as it ends. `TimeoutError` if none ends for
        `seconds`. Those that have not ended when the iteration stops are cancelled."""
        import asyncio

        loop, ended, gpu = self._running(), SimpleQueue[tuple[int, "Future[Any]"]](), gpu_of_thread()
        futures = [asyncio.run_coroutine_threadsafe(_awaited(one, gpu), loop) for one in given]
        try:
            for place, future in enumerate(futures):
                future.add_done_callback(lambda done, place=place: ended.put((place, done)))  # type: ignore[misc]
            for _ in futures:
                yield ended.get(timeout=seconds)
        except Empty:
            raise TimeoutError(f"no call ended within {seconds:g} s") from None
        finally:
            for future in futures:
                future.cancel()

    def _running(self) -> asyncio.AbstractEventLoop:
        import asyncio

        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="async calls", daemon=True)
                self._thread.start()
            return self._loop

    def close(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


async def _awaited(given: Any, gpu: int | None) -> Any:
    """What was awaited, with `gpu` as the current one. Nothing that it raises ends the loop, on which others wait as
    well."""
    try:
        use_gpu(gpu)
        return await given
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


_of_process = Caller()


def result_of(given: Any, seconds: float | None = None) -> Any:
    """`given` itself, or the result of awaiting it on the one event loop of this process. `Overdue` after `seconds`, in
    any thread; a stopwatch ends what the main one does."""
    return _of_process.result(given, seconds, Overdue)


def as_they_end(given: Sequence[Awaitable[Any]], seconds: float | None) -> Ended:
    """`Caller.as_they_end` on the one event loop of this process."""
    return _of_process.as_they_end(given, seconds)


def _forget() -> None:
    """A forked process does not inherit the thread that runs the loop."""
    global _of_process
    _of_process = Caller()


os.register_at_fork(after_in_child=_forget)
