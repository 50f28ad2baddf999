"""Calls of an environment, plain or `async`."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any


class Caller:
    """Calls methods one at a time and waits for what is `async`, always on the same event loop."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        given = method(*arguments)
        if not inspect.isawaitable(given):
            return given
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(_awaited(given))

    def close(self) -> None:
        if self._loop is not None:
            self._loop.close()
            self._loop = None

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


async def _awaited(given: Any) -> Any:
    return await given
