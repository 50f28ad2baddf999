"""Scoring with code from outside: it may take too long, leave something behind, or be `async`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from functools import partial
from typing import TypeVar, cast

from lemma.core.async_calls import as_they_end, result_of
from lemma.core.deadlines import Stopwatch
from lemma.core.outside import OutsideCode
from lemma.rewards.combine import blamed
from lemma.rewards.failures import late
from lemma.rewards.reward import Reward
from lemma.rewards.reward_input import RewardInput

Given = TypeVar("Given")
Found = TypeVar("Found")


def outside_column(reward: Reward, name: str, items: Sequence[RewardInput]) -> list[float | None]:
    """Its values for all completions; a reward that takes them in one call gets the time limit of all of them
    together."""
    if reward.is_async:
        return _awaited_column(reward, name, items)
    limit, at_once = reward.seconds_each, type(reward).score_all is not Reward.score_all
    watch = None if limit is None else Stopwatch(limit * max(1, len(items)) if at_once else limit)
    with watch or nullcontext():
        if at_once:
            score_all = reward.score_all if watch is None else partial(_timed, watch, reward.score_all)
            with blamed(reward, name, items), OutsideCode():
                return result_of(score_all(items))
        score = reward.score if watch is None else partial(_timed, watch, reward.score)
        scored: list[RewardInput] = []
        values: list[float | None] = []
        with blamed(reward, name, scored), OutsideCode():
            for item in items:
                scored[:] = [item]
                value = score(item)
                values.append(value if value is None or type(value) is float else result_of(value))
        return values


def _awaited_column(reward: Reward, name: str, items: Sequence[RewardInput]) -> list[float | None]:
    """The values of a reward that is `async`, for all completions at the same time. The first failure ends the rest."""
    column: dict[int, float | None] = {}
    try:
        calls = [reward.score_async(item) for item in items]
        with OutsideCode(), closing(as_they_end(calls, reward.seconds_each)) as ended:
            for place, future in ended:
                with blamed(reward, name, items[place : place + 1]):
                    column[place] = future.result()
    except TimeoutError as error:
        waiting = next(item for place, item in enumerate(items) if place not in column)
        raise late(reward, name, [waiting]) from error
    return [column[place] for place in range(len(items))]


def _timed(watch: Stopwatch, work: Callable[[Given], Found], given: Given) -> Found:
    """The result of `work`, awaited where it is to be; Overdue if the watch runs out first."""
    watch.begin()
    try:
        return cast("Found", result_of(work(given), watch.seconds))
    finally:
        watch.end()
