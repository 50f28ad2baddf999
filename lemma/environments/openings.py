"""Opens all problems of a stage: adds what their environments say before the first turn."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from lemma.core.errors import UserError
from lemma.core.types import Problem
from lemma.environments.env_handle import EnvFailure
from lemma.environments.env_pool import EnvPool
from lemma.environments.environment import EnvironmentOptions

# Minimum number of environments that are open at the same time per worker.
AT_ONCE = 4


def opened_all(options: EnvironmentOptions, problems: Sequence[Problem], seed: int) -> list[Problem]:
    """The problems as their environment opens them. A problem that cannot be started raises UserError."""
    if not options.says_first:
        return [options.introduced(problem, ()) for problem in problems]
    pool = EnvPool.of(options)
    most = options.episodes or max(options.workers, 1) * max(options.calls_at_once, AT_ONCE)
    opened: list[Problem] = list(problems)

    async def open_every(places: Iterator[int]) -> None:
        for place in places:
            opened[place] = await _opened(pool, options, problems[place], seed)

    async def open_all() -> None:
        places = iter(range(len(problems)))
        await asyncio.gather(*(open_every(places) for _ in range(most)))

    try:
        polled(pool, open_all())
    except BaseException:
        pool.close()
        raise
    return opened


async def _opened(pool: EnvPool, options: EnvironmentOptions, problem: Problem, seed: int) -> Problem:
    env = pool.open(problem, seed)
    try:
        return options.introduced(problem, await env.reset())
    except EnvFailure as failure:
        raise UserError(
            f"environment {options.name} cannot begin problem {problem.id}: {failure.reason}",
            fix="repair its `reset`, or the row of the data",
        ) from None
    finally:
        await env.left()


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
