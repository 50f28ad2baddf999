"""Calls of an environment, plain or `async`, from any thread."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio


class Caller:
    """Calls methods and waits for what is `async`, always on one event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()

    def call(self, method: Callable[..., Any], *arguments: Any, seconds: float | None = None) -> Any:
        """What the method gives. An `async` one that takes longer than `seconds` is cancelled: `TimeoutError`."""
        given = method(*arguments)
        if not inspect.isawaitable(given):
            return given
        import asyncio

        loop = self._running()
        future = asyncio.run_coroutine_threadsafe(_awaited(given), loop)
        try:
            return future.result(seconds)
        except TimeoutError:
            if future.done():
                raise
        # A loop that is held up cannot cancel anything, and no call on it is to blame: whoever watches ends all.
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result()
        future.cancel()
        raise TimeoutError(f"the call took longer than {seconds:g} s")

    def _running(self) -> asyncio.AbstractEventLoop:
        import asyncio

        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="environments", daemon=True).start()
            return self._loop

    def close(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


async def _awaited(given: Any) -> Any:
    """What was awaited. Nothing that it raises ends the loop, on which others wait as well."""
    try:
        return await given
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
