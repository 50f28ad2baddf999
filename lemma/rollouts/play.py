"""Graded episodes of some problems, for training, evaluation and `debug`.

Every episode is in the journal before anything is learnt from it or counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

from lemma.core.faults import fault_point
from lemma.engines.protocol import Engine, Sampling
from lemma.rollouts.episode import Episode
from lemma.rollouts.episode_runner import EpisodeRunner
from lemma.rollouts.journal import Journal
from lemma.rollouts.multi_turn import World
from lemma.rollouts.sample_request import SampleRequest
from lemma.rollouts.scorer import Scorer


def play(
    engine: Engine,
    asks: Sequence[SampleRequest],
    sampling: Sampling | Callable[[SampleRequest], Sampling],
    scorer: Scorer,
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
    sampling_of = sampling if callable(sampling) else lambda ask: sampling
    if world is not None and not world.options.is_stepped:
        from lemma.rollouts.gateway_play import play_agents

        yield from play_agents(engine, asks, sampling_of, scorer, world=world, journal=journal)
        return
    known = journal.episodes if journal is not None else {}
    with closing(EpisodeRunner(engine, sampling_of, scorer, world, patience=patience)) as runner:
        for ask in asks:
            yield from ask.known(known)
            if not ask.is_known(known):
                runner.add(ask, journal)
        yield from runner.run()
        fault_point("rollouts.generated")
        yield from runner.scoring.settle_all()
