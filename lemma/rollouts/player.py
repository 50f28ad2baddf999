"""One episode while it is played: what was said, what came back, and whether there is another turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from lemma.core.types import Finish, Outcome, Problem
from lemma.engines.protocol import Completion, Request, Sampling
from lemma.environments import EnvironmentOptions, Reply, Utterance
from lemma.environments.held import Failure, Held
from lemma.environments.worlds import Worlds
from lemma.rollouts.episode import Episode, Turn

if TYPE_CHECKING:
    from lemma.formats.bridge import Bridge
    from lemma.rollouts.judge import Judge

# What a player waits for: its world, a reply, the worth of the episode; or it speaks next, or the episode is over.
State = Literal["reset", "step", "score", "speaks", "over"]


@dataclass(frozen=True)
class World:
    """Where episodes are played: which environment, how a reply becomes ids, and how long everything may become.

    `understand` makes of a turn's text and end what the environment hears.
    """

    options: EnvironmentOptions
    bridge: Bridge
    context: int
    seed: int = 0
    schedule: Literal["exact", "free"] = "exact"
    understand: Callable[[str, Finish], Utterance] = Utterance

    @property
    def worlds(self) -> Worlds:
        """The environments of these options; their workers start with the first episode and live until `close`."""
        return Worlds.of(self.options)

    @property
    def is_exact(self) -> bool:
        return (self.options.schedule or self.schedule) == "exact"

    @property
    def longest(self) -> int:
        """Maximum number of tokens in an episode."""
        most = self.options.episode_tokens
        return self.context if most is None else min(most, self.context)

    def close(self) -> None:
        """End the workers, and whatever else the environment runs."""
        self.worlds.close()
        self.options.close()


class Player:
    """Plays one episode. Without a world, the first answer is the last.

    Calls of the environment are begun here and not waited for: `hear` goes on once one has ended. An environment that
    fails ends the episode, whose worth is then unknown.
    """

    def __init__(self, problem: Problem, episode: Episode, sampling: Sampling, world: World | None):
        self.problem, self.episode, self._sampling, self._world = problem, episode, sampling, world
        self.state: State = "over"
        self.outcome: Outcome | None = None
        """What the environment says of the episode, once it is over; None without one."""
        self.held: Held | None = None
        self._next = np.zeros(0, dtype=np.int32)
        self._extends = True

    @property
    def is_waiting(self) -> bool:
        return self.state in ("reset", "step", "score")

    def begin(self, judge: Judge) -> None:
        """The policy has spoken for the first time."""
        if self._world is None:
            return
        self._note(judge)
        self.state = "reset"
        self.held = self._world.worlds.open(self.problem, self._world.seed)

    def spoke(self, completion: Completion, judge: Judge) -> None:
        """The policy has answered the last reply."""
        self.episode.turns.append(
            Turn(
                context=self._next,
                ids=completion.ids.astype(np.int32),
                logprobs=completion.logprobs.astype(np.float32),
                kept=completion.kept.astype(np.float32),
                finish=completion.finish,
                versions=completion.versions,
                extends=self._extends,
                seconds=completion.seconds,
            )
        )
        self._note(judge)
        self._step()

    def hear(self) -> None:
        """The call that was waited for has ended: take what it gave, and begin the next one, if any."""
        assert self.held is not None and self._world is not None
        given = self.held.answer
        if isinstance(given, Failure):
            worth = self._world.options.limit_reward if given.is_limit else None
            self._end(Outcome(worth, False if given.is_limit else None, given.reason))
        elif self.state == "reset":
            self._step()
        elif isinstance(given, Reply):
            self._reply(given)
        else:
            assert isinstance(given, Outcome), f"an environment gave {given} as its score"
            self._end(given)

    def request(self) -> Request:
        """The policy's next turn."""
        episode, number = self.episode, len(self.episode.turns)
        room = self._room()
        sampling = replace(
            self._sampling,
            max_tokens=min(self._sampling.max_tokens, room),
            min_tokens=min(self._sampling.min_tokens, room),
        )
        return Request((*episode.key, episode.sample, "turn", number), self._read().astype(np.int64), sampling)

    def close(self) -> None:
        """Leave the world, whatever happens in it."""
        if self.held is not None and self._world is not None:
            self._world.worlds.leave(self.held)

    def _note(self, judge: Judge) -> None:
        turn = self.episode.turns[-1]
        turn.text = judge.text(turn)

    def _step(self) -> None:
        assert self.held is not None and self._world is not None
        turn = self.episode.turns[-1]
        self.state = "step"
        said = self._world.understand(turn.text, turn.finish)
        turn.calls, turn.bad_calls = len(said.tool_calls), sum("error" in call for call in said.tool_calls)
        self._world.worlds.step(self.held, said)

    def _reply(self, reply: Reply) -> None:
        assert self.held is not None and self._world is not None
        world, turn = self._world, self.episode.turns[-1]
        turn.heard, turn.reward = reply.text, reply.reward
        if not (reply.done or len(self.episode.turns) >= world.options.turns or self._is_late()):
            self._extends = reply.prompt is None
            if reply.prompt is None:
                self._next, turn.cut = world.bridge.answer(turn.ids, reply.text, reply.results)
            else:
                self._next = world.bridge.anew(reply.prompt)
            if self._room() >= 1:
                self.state = "speaks"
                return
        if world.options.is_graded:
            self._end(None)
            return
        self.state = "score"
        world.worlds.score(self.held)

    def _is_late(self) -> bool:
        assert self.held is not None and self._world is not None
        most = self._world.options.episode_seconds
        return most is not None and self.held.seconds >= most

    def _end(self, outcome: Outcome | None) -> None:
        self.outcome, self.state = outcome, "over"
        self.close()

    def _read(self) -> np.ndarray:
        """All ids that the policy reads before its next turn."""
        if not self._extends:
            return self._next
        last = len(self.episode.turns) - 1
        return np.concatenate([self.episode.context(last), self.episode.turns[last].ids, self._next])

    def _room(self) -> int:
        assert self._world is not None
        return self._world.longest - len(self._read())
