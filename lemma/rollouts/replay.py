"""What a teacher said in several turns, played again: the world answers it, and says what it was worth."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from lemma.engines.protocol import Completion, Engine, Key, Request, Sampling
from lemma.rollouts.episode import Episode
from lemma.rollouts.episode_runner import play
from lemma.rollouts.multi_turn import World
from lemma.rollouts.sample_request import SampleRequest
from lemma.rollouts.scorer import Scorer


class Script(Engine):
    """An engine that says what somebody said before: each request of an ask gets the next of its turns."""

    name = "script"
    context = 1 << 30

    def __init__(self, turns: Mapping[Key, Sequence[np.ndarray]]):
        self._turns = {key: list(said) for key, said in turns.items()}
        self._waiting: list[Request] = []
        self.finished: deque[Completion] = deque()

    def submit(self, request: Request) -> None:
        self._waiting.append(request)

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting)

    def work(self) -> None:
        while self._waiting:
            request = self._waiting.pop(0)
            said = self._turns[self._ask_of(request.key)].pop(0)
            zeros = np.zeros(len(said), dtype=np.float32)
            self.finished.append(Completion(request.key, 0, said, zeros, zeros, "given", 0))

    def _ask_of(self, key: Key) -> Key:
        """Later turns have keys that begin with that of the first."""
        return next(known for known in self._turns if key[: len(known)] == known)

    def cancel(self, key: Key) -> None:
        self._waiting = [request for request in self._waiting if request.key != key]

    def update_weights(self, version: int) -> None:
        pass

    def invalidate(self) -> None:
        pass

    def close(self) -> None:
        pass


def replayed(
    asks: Sequence[SampleRequest],
    turns: Mapping[Key, Sequence[np.ndarray]],
    sampling: Sampling,
    scorer: Scorer,
    world: World,
) -> list[Episode]:
    """An episode for each ask, all of it a teacher's; it ends where the teacher's turns or the world's patience do."""
    episodes: list[Episode] = []
    for count in sorted({len(turns[ask.request_key]) for ask in asks}):
        part = [ask for ask in asks if len(turns[ask.request_key]) == count]
        limit = min(count, world.options.turns)
        there = replace(world, options=world.options.model_copy(update={"turns": limit}))
        episodes += play(
            Script({ask.request_key: turns[ask.request_key] for ask in part}), part, sampling, scorer, world=there
        )
    for episode in episodes:
        for turn in episode.turns:
            turn.given = len(turn.ids)
    return episodes
