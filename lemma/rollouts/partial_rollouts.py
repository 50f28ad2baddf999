"""Asks of several steps on one engine. A step waits for its own; the others stay where they are, across updates too.

So many play at once as a step has samples, in the order of their draws: the engine is never half empty while the last
response of a step is written, and no response is preferred because it is short.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from lemma.core.faults import fault_point
from lemma.engines.protocol import Engine, Key, Sampling
from lemma.rollouts.episode import Episode
from lemma.rollouts.episode_runner import EpisodeRunner
from lemma.rollouts.journal import Journal
from lemma.rollouts.multi_turn import World
from lemma.rollouts.sample_request import SampleRequest
from lemma.rollouts.scorer import Scorer


class PartialRollouts:
    """With `patience` in seconds, what is graded is written after at most that long; otherwise with the next step."""

    def __init__(
        self,
        engine: Engine,
        sampling: Sampling,
        scorer: Scorer,
        world: World | None,
        *,
        most: int,
        patience: float | None,
    ):
        self._runner = EpisodeRunner(engine, lambda ask: sampling, scorer, world, most=most, patience=patience)
        # Of each ask that has begun, the requests that were made of it.
        self._requests: dict[Key, list[Key]] = {}

    def begin(self, asks: Sequence[SampleRequest], journal: Journal, *, is_urgent: bool = False) -> None:
        """Queue what the journal does not hold and what was not queued before; what is urgent goes before the rest."""
        fresh = [ask for ask in asks if ask.key not in self._requests]
        for ask in reversed(fresh) if is_urgent else fresh:
            parts = list(_unknown(ask, journal.episodes))
            self._requests[ask.key] = [part.request_key for part in parts]
            for part in reversed(parts) if is_urgent else parts:
                self._runner.add(part, journal, is_urgent=is_urgent)

    def finish(self, asks: Sequence[SampleRequest], journal: Journal) -> list[Episode]:
        """Play on until all of these, which have begun, are over, graded and written."""
        wanted = {key for ask in asks for key in self._requests.pop(ask.key)}
        runner = self._runner
        deque(runner.run(lambda: runner.owes(wanted)), maxlen=0)
        fault_point("rollouts.generated")
        runner.scoring.settle_all()
        runner.forget(wanted)
        return [episode for ask in asks for episode in ask.known(journal.episodes)]

    def drain(self) -> None:
        """Play until the engine is empty, and begin nothing meanwhile: it has other work."""
        self._runner.is_open = False
        try:
            deque(self._runner.run(lambda: self._runner.is_running), maxlen=0)
        finally:
            self._runner.is_open = True


def _unknown(ask: SampleRequest, episodes: Mapping[tuple[str, int], Episode]) -> Iterable[SampleRequest]:
    """What is still to be played of an ask: all of it, or single attempts, each with noise of its own."""
    known = {episode.sample for episode in ask.known(episodes)}
    if not known:
        yield ask
        return
    for number in range(ask.first, ask.first + ask.n):
        if number not in known:
            yield replace(ask, n=1, first=number, name=(*ask.key, "again", number))
