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

    def call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        given = method(*arguments)
        if not inspect.isawaitable(given):
            return given
        import asyncio

        return asyncio.run_coroutine_threadsafe(_awaited(given), self._running()).result()

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
    return await given
