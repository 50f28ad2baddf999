"""Runs what awaits calls of environments, where no engine is at work."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from lemma.environments.env_pool import EnvPool

# How often deadlines are looked at while nothing arrives.
POLL_SECONDS = 0.5
T = TypeVar("T")


def polled(pool: EnvPool, work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that awaits calls of this pool."""
    return asyncio.run(_polled(pool, work))


async def _polled(pool: EnvPool, work: Coroutine[Any, Any, T]) -> T:
    loop, news = asyncio.get_running_loop(), asyncio.Event()
    pool.notify(loop, news.set)
    task = loop.create_task(work)
    task.add_done_callback(lambda _: news.set())
    try:
        while not task.done():
            pool.poll()
            with suppress(TimeoutError):
                await asyncio.wait_for(news.wait(), POLL_SECONDS)
            news.clear()
        return task.result()
    finally:
        task.cancel()
        pool.notify(loop, None)
