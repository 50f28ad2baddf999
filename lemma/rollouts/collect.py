"""From problems to graded samples: generation and grading at the same time, every sample in the journal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lemma.core.faults import fault_point
from lemma.core.types import Problem
from lemma.engines.protocol import Completion, Engine, Key, Request, Sampling
from lemma.rollouts.journal import Journal
from lemma.rollouts.judge import Judge, Pending
from lemma.rollouts.sample import Sample

# Samples that are scored together.
BATCH = 64
# How many verdicts may be on their way before the oldest is waited for.
MOST_WAITING = 4096
NOTHING = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True)
class Ask:
    """`n` samples for one problem, numbered from `first`. A `prefix` begins the response on a teacher's behalf."""

    key: Key
    problem: Problem
    prompt: np.ndarray
    n: int = 1
    prefix: np.ndarray = field(default_factory=lambda: NOTHING)
    first: int = 0

    def request(self, sampling: Sampling) -> Request:
        return Request(self.key, np.concatenate([self.prompt, self.prefix]).astype(np.int64), sampling, self.n)


def collect(
    engine: Engine,
    asks: Sequence[Ask],
    sampling: Sampling | Callable[[Ask], Sampling],
    judge: Judge,
    *,
    journal: Journal | None = None,
    extra: Callable[[Ask, Sample], Mapping[str, Any]] = lambda ask, sample: {},
    patience: float | None = None,
) -> Iterator[Sample]:
    """Graded samples, roughly in the order in which they finish; sort them before anything depends on the order.

    What the journal holds already is handed back first and not generated again: of an ask that is there in part, all
    samples are generated and those that are there are passed over. `extra` gives further columns for the journal.

    Samples are scored in batches that depend on the order alone, never on time, since the last bit of a reward model's
    score may depend on its batch. With `patience` in seconds, what is graded does not wait for a batch any longer than
    that, nor when the engine fails: for rewards that look at one completion at a time.
    """
    known = journal.samples if journal is not None else {}
    missing: dict[Key, Ask] = {}
    for ask in asks:
        there = [known.get((repr(ask.key), ask.first + i)) for i in range(ask.n)]
        yield from (sample for sample in there if sample is not None)
        if None in there:
            missing[ask.key] = ask
    for ask in missing.values():
        engine.submit(ask.request(sampling(ask) if callable(sampling) else sampling))
    waiting = _Waiting(judge, journal, extra)
    try:
        for completion in engine.completions():
            ask = missing[completion.key]
            sample = _sample(ask, completion)
            if sample.order in known:
                continue
            fault_point("rollouts.sampled")
            waiting.add(ask, sample)
            yield from waiting.settle(waiting.due(patience))
    except Exception:
        if patience is not None:
            waiting.settle(waiting.graded())
        raise
    fault_point("rollouts.generated")
    while waiting.all:
        yield from waiting.settle(waiting.all[:BATCH])


class _Waiting:
    """Samples that are being graded, in the order in which they came."""

    def __init__(self, judge: Judge, journal: Journal | None, extra: Callable[[Ask, Sample], Mapping[str, Any]]):
        self._judge, self._journal, self._extra = judge, journal, extra
        self._settled = time.monotonic()
        self.all: list[tuple[Ask, Pending]] = []

    def add(self, ask: Ask, sample: Sample) -> None:
        self.all.append((ask, self._judge.begin(ask.problem, sample)))

    def graded(self) -> list[tuple[Ask, Pending]]:
        return [one for one in self.all if not one[1].item.is_waiting]

    def due(self, patience: float | None) -> list[tuple[Ask, Pending]]:
        """What should be scored now: all that is graded after `patience`, or else a full batch, or nothing."""
        if patience is not None and time.monotonic() - self._settled >= patience:
            self._settled = time.monotonic()
            return self.graded()
        batch = self.all[:BATCH]
        if len(batch) == BATCH and (len(self.all) >= MOST_WAITING or not any(one.item.is_waiting for _, one in batch)):
            return batch
        return []

    def settle(self, part: Sequence[tuple[Ask, Pending]]) -> list[Sample]:
        """Score these together, write them to the journal, and wait for them no more."""
        if not part:
            return []
        samples = self._judge.finish([pending for _, pending in part])
        if self._journal is not None:
            for (ask, _), sample in zip(part, samples, strict=True):
                self._journal.append(sample, self._extra(ask, sample))
        gone = {id(pending) for _, pending in part}
        self.all = [one for one in self.all if id(one[1]) not in gone]
        self._settled = time.monotonic()
        return samples


def _sample(ask: Ask, completion: Completion) -> Sample:
    """The completion as the response to the problem, the teacher's prefix in front."""
    gap = np.zeros(len(ask.prefix), dtype=np.float32)
    return Sample(
        key=ask.key,
        sample=ask.first + completion.sample,
        problem_id=ask.problem.id,
        prompt=ask.prompt.astype(np.int32),
        ids=np.concatenate([ask.prefix, completion.ids]).astype(np.int32),
        logprobs=np.concatenate([gap, completion.logprobs]).astype(np.float32),
        kept=np.concatenate([gap, completion.kept]).astype(np.float32),
        finish=completion.finish,
        policy_version=completion.policy_version,
        given=len(ask.prefix),
        seconds=completion.seconds,
    )
