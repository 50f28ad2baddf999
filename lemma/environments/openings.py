"""Opens all problems of a stage: adds what their environments say before the first turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from lemma.core.errors import UserError
from lemma.core.types import Problem
from lemma.environments.environment import EnvironmentOptions
from lemma.environments.held import Failure, Held
from lemma.environments.worlds import Worlds

LOOK_SECONDS = 1.0
# Minimum number of worlds that are open at the same time per worker.
AT_ONCE = 4


def opened_all(options: EnvironmentOptions, problems: Sequence[Problem], seed: int) -> list[Problem]:
    """The problems as their environment opens them. A problem that cannot be started raises UserError."""
    if options.workers == 0 or type(options).opened is not EnvironmentOptions.opened:
        return [_opened_here(options, problem, seed) for problem in problems]
    worlds = Worlds.of(options)
    most = options.episodes or options.workers * max(options.calls_at_once, AT_ONCE)
    coming, waiting, leaving = deque(enumerate(problems)), dict[int, int](), list[Held]()
    opened: dict[int, Problem] = {}
    try:
        while coming or waiting:
            leaving = [held for held in leaving if held.home is not None]
            while coming and len(waiting) + len(leaving) < most:
                place, problem = coming.popleft()
                waiting[id(worlds.open(problem, seed))] = place
            for held in worlds.answers(LOOK_SECONDS):
                place = waiting.pop(id(held))
                if isinstance(held.answer, Failure):
                    raise _cannot_begin(options, held.problem, held.answer.reason)
                opened[place] = options.introduced(held.problem, held.answer)
                worlds.leave(held)
                leaving.append(held)
    except BaseException:
        worlds.close()
        raise
    return [opened[place] for place in range(len(problems))]


def _opened_here(options: EnvironmentOptions, problem: Problem, seed: int) -> Problem:
    try:
        return options.opened(problem, seed)
    except UserError:
        raise
    except Exception as error:
        raise _cannot_begin(options, problem, f"{type(error).__name__}: {error}") from error


def _cannot_begin(options: EnvironmentOptions, problem: Problem, reason: str) -> UserError:
    return UserError(
        f"environment {options.name} cannot begin problem {problem.id}: {reason}",
        fix="repair its `reset`, or the row of the data",
    )
