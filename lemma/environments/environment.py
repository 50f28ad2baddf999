"""What answers the policy between its turns. One instance serves one episode.

Its state depends on the problem, the seed and what was said, and on nothing else: an episode can be played again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pydantic import Field

from lemma.config import Options
from lemma.core.types import Finish, Message, Outcome, Problem
from lemma.environments.attempts import Attempt


@dataclass(frozen=True, slots=True)
class Utterance:
    """What the policy said in a turn, without the token that ended it, and how the turn ended."""

    text: str
    finish: Finish = "stop"


@dataclass(frozen=True, slots=True)
class Reply:
    """What the policy reads next. `done` ends the episode; `reward` is for this turn, where the task gives one."""

    text: str = ""
    done: bool = False
    reward: float | None = None


class Environment:
    """Override `step` and `score`, and `reset` where an episode begins with more than its problem."""

    def reset(self, problem: Problem, seed: int) -> Sequence[Message]:
        """Begin. Gives messages that stand behind the problem's own in the first prompt.

        Called once more when a stage prepares its problems: the same problem and seed give the same messages.
        """
        return []

    def step(self, said: Utterance) -> Reply:
        """Answer what was said."""
        raise NotImplementedError

    def score(self) -> Outcome:
        """What the episode was worth, once it is over."""
        raise NotImplementedError

    def close(self) -> None:
        """Give back what the episode held. Called once, whatever happened."""


class EnvironmentOptions(Options):
    """Which environment, and how far an episode may go."""

    name: str = ""
    """Which environment."""
    turns: int = Field(8, ge=1)
    """Maximum number of turns in an episode."""
    reply_tokens: int = Field(512, ge=1)
    """Maximum number of tokens in a reply; a longer one loses its middle, and the metrics count it."""

    @property
    def is_single_turn(self) -> bool:
        """Whether the first answer is the last, and rewards alone say what it is worth."""
        return False

    def make(self) -> Environment:
        """A world for one episode."""
        raise NotImplementedError

    def opened(self, problem: Problem, seed: int) -> Problem:
        """The problem with what the environment says before the first turn."""
        world = self.make()
        try:
            messages = tuple(world.reset(problem, seed))
        finally:
            world.close()
        return replace(problem, messages=(*problem.messages, *messages)) if messages else problem

    def check(self) -> None:
        """Refuse, before anything is loaded, what could never be played, such as a class that is not there."""

    def problems(self, split: str) -> Sequence[Problem] | None:
        """The environment's own problems of a split, always the same ones in the same order; None where it has none.

        `lemma eval MODEL --environment NAME --split dev` plays these.
        """
        return None

    def summarise(self, attempts: Sequence[Attempt]) -> Mapping[str, Sequence[float]]:
        """Measures of the environment's own, in addition to success and turns.

        A measure is one number from 0 to 1 for each thing that counts once, such as a task or a scenario: the
        evaluation gives their mean and its 95% interval. What is unknown is left out.
        """
        return {}

    def room(self, turn_tokens: int) -> int:
        """Maximum number of tokens after the first prompt, including the template's tokens between turns."""
        return self.turns * turn_tokens + (self.turns - 1) * (self.reply_tokens + MARKS)


# Tokens of a chat template between two turns.
MARKS = 32
