"""One episode while it is played: what was said, what came back, and whether there is another turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from lemma.core.errors import UserError
from lemma.core.types import Problem
from lemma.engines.protocol import Completion, Request, Sampling
from lemma.environments import Environment, EnvironmentOptions, Outcome, Reply, Utterance
from lemma.rollouts.episode import Episode, Turn

if TYPE_CHECKING:
    from lemma.formats.bridge import Bridge
    from lemma.rollouts.judge import Judge


T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """Where episodes are played: which environment, how a reply becomes ids, and how long everything may become."""

    options: EnvironmentOptions
    bridge: Bridge
    context: int
    seed: int = 0

    def close(self) -> None:
        """End what it holds."""


class Player:
    """Plays one episode. Without a world, the first answer is the last.

    An environment that raises ends the episode, whose worth is then unknown.
    """

    def __init__(self, problem: Problem, episode: Episode, sampling: Sampling, world: World | None):
        self.problem, self.episode, self._sampling, self._world = problem, episode, sampling, world
        self._environment: Environment | None = None
        self._next = np.zeros(0, dtype=np.int32)
        self._failed: str | None = None
        if world is not None:
            self._environment = world.options.make()
            self._try(object, lambda environment: environment.reset(problem, world.seed))

    def spoke(self, completion: Completion) -> None:
        """The policy has answered the last reply."""
        self.episode.turns.append(
            Turn(
                context=self._next,
                ids=completion.ids.astype(np.int32),
                logprobs=completion.logprobs.astype(np.float32),
                kept=completion.kept.astype(np.float32),
                finish=completion.finish,
                versions=((0, completion.policy_version),),
                extends=True,
                seconds=completion.seconds,
            )
        )

    def goes_on(self, judge: Judge) -> bool:
        """Let the environment answer what was said last; whether the policy speaks again."""
        world, turn = self._world, self.episode.turns[-1]
        if world is None or self._failed is not None:
            return False
        turn.text = judge.text(turn)
        reply = self._try(Reply, lambda environment: environment.step(Utterance(turn.text, turn.finish)))
        if reply is None:
            return False
        turn.heard, turn.reward = reply.text, reply.reward
        if reply.done or len(self.episode.turns) >= world.options.turns:
            return False
        self._next, turn.cut = world.bridge.ids(turn.ids, reply.text)
        return self._room() >= 1

    def request(self) -> Request:
        """The policy's next turn."""
        episode, number = self.episode, len(self.episode.turns)
        sampling = replace(self._sampling, max_tokens=min(self._sampling.max_tokens, self._room()))
        return Request((*episode.key, episode.sample, "turn", number), self._read().astype(np.int64), sampling)

    def _read(self) -> np.ndarray:
        """All ids that the policy reads before its next turn."""
        last = len(self.episode.turns) - 1
        return np.concatenate([self.episode.context(last), self.episode.turns[last].ids, self._next])

    def _room(self) -> int:
        assert self._world is not None
        return self._world.context - len(self._read())

    def outcome(self) -> Outcome | None:
        """What the environment says of the episode; None without one. The world is gone afterwards."""
        if self._world is None:
            return None
        outcome = self._try(Outcome, lambda environment: environment.score())
        self.close()
        return Outcome(None, None, self._failed or "") if outcome is None else outcome

    def close(self) -> None:
        if self._environment is not None:
            self._environment.close()
            self._environment = None

    def _try(self, kind: type[T], call: Callable[[Environment], object]) -> T | None:
        """What the environment gives; None, and a reason noted, where it raises."""
        if self._failed is not None or self._environment is None:
            return None
        try:
            given = call(self._environment)
        except Exception as error:  # noqa: BLE001  (what an environment raises is not the policy's fault)
            self._failed = f"the environment failed: {type(error).__name__}: {error}"
            return None
        if not isinstance(given, kind):
            raise UserError(
                f"the environment {type(self._environment).__name__} gave {type(given).__name__} where "
                f"{kind.__name__} is wanted",
                fix=f"return a `lemma.environments.{kind.__name__}`",
            )
        return given
