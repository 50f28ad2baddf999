"""The one driver of episodes, for training, evaluation and `debug`: generation, replies and grading at the same time.

Every episode is in the journal before anything is learnt from it or counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module

import numpy as np

from lemma.core.faults import fault_point
from lemma.core.types import Problem
from lemma.engines.protocol import Completion, Engine, Key, Request, Sampling
from lemma.rollouts.episode import Episode, Turn
from lemma.rollouts.journal import Journal
from lemma.rollouts.judge import Judge, Pending
from lemma.rollouts.player import Player, World
from lemma.rollouts.table import Table

# Episodes that are scored together.
BATCH = 64
# How many verdicts may be on their way before the oldest is waited for.
MOST_WAITING = 4096
# Seconds between two looks at what is graded, while nobody speaks.
LOOK_SECONDS = 0.5
NOTHING = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True)
class Ask:
    """`n` attempts at one problem, numbered from `first`. A `prefix` begins the response on a teacher's behalf."""

    key: Key
    problem: Problem
    prompt: np.ndarray
    n: int = 1
    prefix: np.ndarray = field(default_factory=lambda: NOTHING)
    first: int = 0

    def request(self, sampling: Sampling) -> Request:
        return Request(self.key, np.concatenate([self.prompt, self.prefix]).astype(np.int64), sampling, self.n)

    def known(self, episodes: Mapping[tuple[str, int], Episode]) -> list[Episode]:
        """Those of its attempts that are among these."""
        there = [episodes.get((repr(self.key), self.first + i)) for i in range(self.n)]
        return [episode for episode in there if episode is not None]

    def is_known(self, episodes: Mapping[tuple[str, int], Episode]) -> bool:
        return len(self.known(episodes)) == self.n


def play(
    engine: Engine,
    asks: Sequence[Ask],
    sampling: Sampling | Callable[[Ask], Sampling],
    judge: Judge,
    *,
    world: World | None = None,
    journal: Journal | None = None,
    patience: float | None = None,
) -> Iterator[Episode]:
    """Graded episodes, roughly in the order in which they finish; sort them before anything depends on the order.

    What the journal holds already is handed back first and not played again: of an ask that is there in part, all
    attempts are made and those that are there are passed over. Without a `world` the first answer is the last; in one,
    replies are made while others generate.

    Episodes are scored in batches that depend on the order alone, never on time, since the last bit of a reward model's
    score may depend on its batch. With `patience` in seconds, what is graded does not wait for a batch any longer than
    that, nor when the engine fails: for rewards that look at one completion at a time.
    """
    if world is not None and world.options.driver is not None:
        yield from _driver(world.options.driver)(
            engine, asks, sampling, judge, world=world, journal=journal, patience=patience
        )
        return
    known = journal.episodes if journal is not None else {}
    missing: dict[Key, Ask] = {}
    for ask in asks:
        yield from ask.known(known)
        if not ask.is_known(known):
            missing[ask.key] = ask
    waiting = _Waiting(judge, journal)
    drawn = sampling if callable(sampling) else lambda ask: sampling

    def over(player: Player) -> None:
        table.leave(missing[player.episode.key])
        waiting.add(player)

    table = Table(engine, world, missing.values(), drawn, over)
    before, engine.between = engine.between, table.look if world is not None else engine.between
    try:
        while table.next_turn():
            for completion in engine.completions():
                player = table.speaker(completion)
                if player is not None:
                    player.spoke(completion, judge)
                else:
                    ask = missing[completion.key]
                    player = Player(ask.problem, _begun(ask, completion), drawn(ask), world)
                    if player.episode.order in known:
                        table.leave(ask)
                        continue
                    fault_point("rollouts.sampled")
                    player.begin(judge)
                table.sit(player)
                yield from waiting.settle(waiting.due(patience))
            while table.is_waiting and not table.may_speak:
                table.look(LOOK_SECONDS)
                yield from waiting.settle(waiting.due(patience))
    except Exception:
        if patience is not None:
            waiting.settle(waiting.graded())
        raise
    finally:
        engine.between = before
        table.clear()
    fault_point("rollouts.generated")
    while waiting.all:
        yield from waiting.settle(waiting.all[:BATCH])


def _driver(place: str) -> Callable[..., Iterator[Episode]]:
    module, _, name = place.partition(":")
    driver: Callable[..., Iterator[Episode]] = getattr(import_module(module), name)
    return driver


class _Waiting:
    """Episodes that are being graded, in the order in which they came."""

    def __init__(self, judge: Judge, journal: Journal | None):
        self._judge, self._journal = judge, journal
        self._settled = time.monotonic()
        self.all: list[Pending] = []

    def add(self, player: Player) -> None:
        self.all.append(self._judge.begin(player.problem, player.episode, player.outcome))

    def graded(self) -> list[Pending]:
        return [one for one in self.all if not one.item.is_waiting]

    def due(self, patience: float | None) -> list[Pending]:
        """What should be scored now: all that is graded after `patience`, or else a full batch, or nothing."""
        if patience is not None and time.monotonic() - self._settled >= patience:
            self._settled = time.monotonic()
            return self.graded()
        batch = self.all[:BATCH]
        if len(batch) == BATCH and (len(self.all) >= MOST_WAITING or not any(one.item.is_waiting for one in batch)):
            return batch
        return []

    def settle(self, part: Sequence[Pending]) -> list[Episode]:
        """Score these together, write them to the journal, and wait for them no more."""
        if not part:
            return []
        episodes = self._judge.finish(part)
        if self._journal is not None:
            for episode in episodes:
                self._journal.append(episode)
        gone = {id(pending) for pending in part}
        self.all = [one for one in self.all if id(one) not in gone]
        self._settled = time.monotonic()
        return episodes


def _begun(ask: Ask, completion: Completion) -> Episode:
    """An episode whose first turn is this completion, the teacher's prefix in front."""
    gap = np.zeros(len(ask.prefix), dtype=np.float32)
    turn = Turn(
        context=ask.prompt.astype(np.int32),
        ids=np.concatenate([ask.prefix, completion.ids]).astype(np.int32),
        logprobs=np.concatenate([gap, completion.logprobs]).astype(np.float32),
        kept=np.concatenate([gap, completion.kept]).astype(np.float32),
        finish=completion.finish,
        versions=((0, completion.policy_version),),
        given=len(ask.prefix),
        seconds=completion.seconds,
    )
    return Episode(ask.key, ask.first + completion.sample, ask.problem.id, [turn], ask.problem.question)
