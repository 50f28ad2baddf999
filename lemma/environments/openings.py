"""What environments say before the first turn, for all problems of a stage."""

from __future__ import annotations

from collections.abc import Sequence

from lemma.core.errors import UserError
from lemma.core.types import Problem
from lemma.environments.environment import EnvironmentOptions, with_messages
from lemma.environments.held import Failure
from lemma.environments.worlds import Worlds

LOOK_SECONDS = 1.0


def opened_all(options: EnvironmentOptions, problems: Sequence[Problem], seed: int) -> list[Problem]:
    """The problems as their environment opens them. One that cannot even begin stops everything, in one sentence."""
    if options.workers == 0 or type(options).opened is not EnvironmentOptions.opened:
        return [_opened_here(options, problem, seed) for problem in problems]
    worlds = Worlds.of(options)
    waiting = {id(held): place for place, held in enumerate(worlds.open(problem, seed) for problem in problems)}
    opened: dict[int, Problem] = {}
    try:
        while waiting:
            for held in worlds.answers(LOOK_SECONDS):
                place = waiting.pop(id(held))
                if isinstance(held.answer, Failure):
                    raise _cannot_begin(options, held.problem, held.answer.reason)
                opened[place] = with_messages(held.problem, held.answer)
                worlds.leave(held)
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
