"""The one driver of episodes, for training, evaluation and `debug`: generation, replies and grading at the same time.

Every episode is in the journal before anything is learnt from it or counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
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
    """`n` attempts at one problem, numbered from `first`. A `prefix` begins the response on a teacher's behalf.

    The engine knows it by its key, or by `name`, where noise other than the key's is wanted.
    """

    key: Key
    problem: Problem
    prompt: np.ndarray
    n: int = 1
    prefix: np.ndarray = field(default_factory=lambda: NOTHING)
    first: int = 0
    name: Key | None = None

    @cached_property
    def read(self) -> np.ndarray:
        """The prompt as all its attempts have it."""
        return self.prompt.astype(np.int32)

    @cached_property
    def question(self) -> str:
        return self.problem.question

    @property
    def request_key(self) -> Key:
        return self.name or self.key

    def request(self, sampling: Sampling) -> Request:
        return Request(self.request_key, np.concatenate([self.prompt, self.prefix]).astype(np.int64), sampling, self.n)

    def known(self, episodes: Mapping[tuple[str, int], Episode]) -> list[Episode]:
        """Those of its attempts that are among these."""
        if not episodes:
            return []
        key = repr(self.key)
        there = [episodes.get((key, self.first + i)) for i in range(self.n)]
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
    playing = Playing(engine, sampling, judge, world)
    for ask in asks:
        yield from ask.known(known)
        if not ask.is_known(known):
            playing.add(ask, journal)
    table, waiting = playing.table, playing.waiting
    with playing.at_engine():
        try:
            while table.next_turn():
                for completion in engine.completions():
                    playing.hear(completion)
                    yield from waiting.settle(waiting.due(patience))
                while table.is_waiting and not table.may_speak:
                    table.look(LOOK_SECONDS)
                    yield from waiting.settle(waiting.due(patience))
        except Exception:
            if patience is not None:
                waiting.settle(waiting.graded())
            raise
    fault_point("rollouts.generated")
    while waiting.all:
        yield from waiting.settle(waiting.all[:BATCH])


def _driver(place: str) -> Callable[..., Iterator[Episode]]:
    module, _, name = place.partition(":")
    driver: Callable[..., Iterator[Episode]] = getattr(import_module(module), name)
    return driver


class Playing:
    """Episodes under way on one engine, from an ask to its grades. With `most`, so many play at once, and further asks
    begin as others end."""

    def __init__(
        self,
        engine: Engine,
        sampling: Sampling | Callable[[Ask], Sampling],
        judge: Judge,
        world: World | None,
        *,
        most: int | None = None,
    ):
        self._engine, self._judge, self._world = engine, judge, world
        self._sampling = sampling if callable(sampling) else lambda ask: sampling
        self._asks: dict[Key, Ask] = {}
        self._journals: dict[Key, Journal | None] = {}
        self._owed: dict[Key, int] = {}
        self._players: dict[int, Ask] = {}
        # Episodes of one turn that were read before their completions are heard.
        self._read: dict[tuple[Key, int], Episode] = {}
        self.waiting = Waiting(judge)
        self.table = Table(engine, world, self._sampling, self._over, most)

    def add(self, ask: Ask, journal: Journal | None, *, is_urgent: bool = False) -> None:
        """Episodes of this ask will be written to the journal; those that are there are not played."""
        key = ask.request_key
        self._asks[key], self._journals[key], self._owed[key] = ask, journal, ask.n
        self.table.add(ask, is_urgent=is_urgent)

    def owes(self, requests: Iterable[Key]) -> bool:
        """Whether any attempt of these is not over."""
        return any(self._owed[key] for key in requests)

    def forget(self, requests: Iterable[Key]) -> None:
        for key in requests:
            del self._asks[key], self._journals[key], self._owed[key]

    def hear(self, completion: Completion) -> None:
        """Somebody has spoken: it may be the first turn of an episode, a later one, or the last."""
        player = self.table.speaker(completion)
        if player is not None:
            player.spoke(completion, self._judge)
        else:
            ask, journal = self._asks[completion.key], self._journals[completion.key]
            episode = self._begun(ask, completion)
            if journal is not None and journal.episodes and episode.order in journal.episodes:
                self._leave(ask)
                return
            fault_point("rollouts.sampled")
            player = Player(ask.problem, episode, self._sampling(ask), self._world)
            self._players[id(player)] = ask
            player.begin(self._judge)
        self.table.sit(player)

    def _begun(self, ask: Ask, completion: Completion) -> Episode:
        """The episode that begins with this completion. Where its first turn is its last, those of all completions that
        are at hand are begun and read together."""
        if self._world is not None:
            return _first_turn(ask, completion)
        place = completion.key, completion.sample
        if place not in self._read and (others := self._engine.finished):
            together = [one for one in (completion, *others) if one.key in self._asks]
            episodes = [_first_turn(self._asks[one.key], one) for one in together]
            self._judge.read(episodes)
            self._read |= {(one.key, one.sample): episode for one, episode in zip(together, episodes, strict=True)}
        return self._read.pop(place, None) or _first_turn(ask, completion)

    def _over(self, player: Player) -> None:
        ask = self._players.pop(id(player))
        self._leave(ask)
        self.waiting.add(player, self._journals[ask.request_key])

    def _leave(self, ask: Ask) -> None:
        self._owed[ask.request_key] -= 1
        self.table.leave(ask)

    @contextmanager
    def at_engine(self) -> Iterator[None]:
        """Within `with`, replies are heard between tokens. Where it is left by an exception, nothing stays behind: no
        request in the engine, and no open world."""
        before, self._engine.between_steps = self._engine.between_steps, self._between(self._engine.between_steps)
        try:
            yield
        except BaseException:
            self.give_up()
            raise
        finally:
            self._engine.between_steps = before

    def _between(self, before: Callable[[], None] | None) -> Callable[[], None] | None:
        return before if self._world is None else self.table.look

    def give_up(self) -> None:
        """Leave nothing behind in the engine, and leave every world."""
        self._read.clear()
        self.table.clear()
        self._engine.drop(self.table.unfinished)


class Waiting:
    """Episodes that are being graded, in the order in which they came."""

    def __init__(self, judge: Judge):
        self._judge = judge
        self._journals: dict[int, Journal | None] = {}
        self._settled = time.monotonic()
        self.all: list[Pending] = []

    def add(self, player: Player, journal: Journal | None) -> None:
        pending = self._judge.begin(player.problem, player.episode, player.outcome)
        self.all.append(pending)
        self._journals[id(pending)] = journal

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
        """Score these together, write them to their journals, and wait for them no more."""
        if not part:
            return []
        episodes = self._judge.finish(part)
        gone = {id(pending) for pending in part}
        self.all = [one for one in self.all if id(one) not in gone]
        by_journal: dict[int, tuple[Journal, list[Episode]]] = {}
        for pending, episode in zip(part, episodes, strict=True):
            journal = self._journals.pop(id(pending))
            if journal is not None:
                by_journal.setdefault(id(journal), (journal, []))[1].append(episode)
        for journal, own in by_journal.values():
            journal.append(*own)
        self._settled = time.monotonic()
        return episodes


def _first_turn(ask: Ask, completion: Completion) -> Episode:
    """An episode whose first turn is this completion, the teacher's prefix in front."""
    given, versions = len(ask.prefix), completion.versions
    ids, logprobs, kept = completion.ids, completion.logprobs, completion.kept
    if given:
        versions = tuple((first and first + given, version) for first, version in versions)
        gap = np.zeros(given, dtype=np.float32)
        ids, logprobs, kept = (np.concatenate(pair) for pair in ((ask.prefix, ids), (gap, logprobs), (gap, kept)))
    turn = Turn(
        context=ask.read,
        ids=ids.astype(np.int32),
        logprobs=logprobs.astype(np.float32),
        kept=kept.astype(np.float32),
        finish=completion.finish,
        versions=versions,
        given=given,
        seconds=completion.seconds,
    )
    return Episode(ask.key, ask.first + completion.sample, ask.problem.id, [turn], ask.question)
