"""A teacher's traces as attempts: whole responses, beginnings of others, and turns that are played again in a world,
which answers them and says what they were worth."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from lemma.engines.protocol import Completion, Engine, Key, Request, Sampling
from lemma.rollouts.episode import Episode
from lemma.rollouts.episode_runner import play
from lemma.rollouts.multi_turn import World
from lemma.rollouts.order import Task
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


def begun_by_teacher(
    key: Key, task: Task, lengths: Sequence[int]
) -> tuple[list[Episode], list[SampleRequest], list[int]]:
    """The attempts of one draw, of which a teacher's trace begins so many tokens each: those that it says in full, what
    the policy is asked after a beginning, and the numbers of those that the policy begins itself."""
    assert task.trace is not None
    whole: list[Episode] = []
    asks: list[SampleRequest] = []
    zeros, trace = np.zeros(len(task.trace), dtype=np.float32), task.trace.astype(np.int32)
    for number, length in enumerate(lengths):
        if length >= len(trace):
            whole.append(Episode.at_once(
                (*key, "trace"), number, task.problem.id, task.prompt.astype(np.int32), trace, zeros, zeros, "given",
                given=len(trace), question=task.problem.question,
            ))  # fmt: skip
        elif length:
            asks.append(
                SampleRequest((*key, "after", number), task.problem, task.prompt, 1, trace[:length].copy(), number)
            )
    return whole, asks, [number for number, length in enumerate(lengths) if not length]


def replay_traces(
    pairs: Sequence[tuple[Episode, Task]], sampling: Sampling, scorer: Scorer, world: World
) -> list[Episode]:
    """A teacher's episodes of several turns, answered and judged by the world."""
    asks = [
        SampleRequest(one.key, task.problem, task.prompt, first=one.sample, name=(*one.key, one.sample))
        for one, task in pairs
    ]
    turns = {
        ask.request_key: [ids[: sampling.max_tokens].astype(np.int32) for ids in task.turns]
        for ask, (_, task) in zip(asks, pairs, strict=True)
    }
    return replayed(asks, turns, sampling, scorer, world)
