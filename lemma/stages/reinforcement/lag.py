"""`rollout.lag`: sampling ahead of the learner. With lag k, step t is sampled wholly by version max(0, t - 1 - k).

A schedule and nothing else: while the engine holds version v, what is due are the steps up to v + 1 + k. No weights are
copied, nothing is discarded, and what is pending is in its journal, where a run that goes on reads it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from lemma.algorithms import Algorithm
from lemma.core.ranks import world_size
from lemma.engines.protocol import Engine
from lemma.rollouts import ProblemOrder, Rollouts
from lemma.stages.reinforcement.rl_options import ReinforcementOptions


def corrected(options: ReinforcementOptions) -> Algorithm:
    """The stage's algorithm; samples of older versions have truncated weights old / behaviour, unless it has its own
    cap, or whole samples are weighed already."""
    algorithm, rollout = options.algorithm, options.rollout
    has_weights = getattr(algorithm, "mismatch_cap", 0.0) is None and getattr(algorithm, "gain", "") != "vespo"
    if not rollout.lag or rollout.lag_cap is None or not has_weights:
        return algorithm
    return algorithm.model_copy(update={"mismatch_cap": rollout.lag_cap})


class Ahead:
    """The rollouts of each step, sampled at most `lag` steps early. Saves how many problems were drawn before the first
    step that is still to be learnt from: later ones are drawn again, in the same order, when a run goes on."""

    def __init__(self, order: ProblemOrder, lag: int, total: int):
        self._order, self._lag, self._total = order, lag, total
        self._ready: dict[int, Rollouts] = {}
        self._drawn: dict[int, int] = {}
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._sample: Callable[[int], Rollouts] | None = None
        self._is_beside = False
        self._graded = 0.0

    def use(self, sample: Callable[[int], Rollouts], *, is_beside: bool) -> None:
        """Sample with this; `is_beside` says that the engine needs nothing of what the learner uses meanwhile."""
        self._sample, self._is_beside = sample, is_beside and self._lag > 0

    def take(self, step: int) -> Rollouts:
        """The rollouts of this step. The others that are due follow: at once, or while the learner works. Their
        grading counts where it was waited for."""
        self.wait()
        self._graded = 0.0
        self._steps(max(self._drawn, default=step - 1) + 1, step)
        first, last = max(self._drawn) + 1, min(step + self._lag, self._total)
        del self._drawn[step]
        if self._is_beside and first <= last:
            self._thread = threading.Thread(target=self._work, args=(first, last), name="sampling ahead", daemon=True)
            self._thread.start()
        else:
            self._steps(first, last)
        rollouts = self._ready.pop(step)
        rollouts.grade_seconds = self._graded
        return rollouts

    @property
    def is_sampling(self) -> bool:
        return self._thread is not None

    def wait(self) -> None:
        """Until nothing is being sampled: the engine may take new weights, or other work."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def close(self) -> None:
        """The engine is closed: what is being sampled fails, and nobody wants it."""
        if self._thread is not None:
            self._thread.join(timeout=10.0)

    def _work(self, first: int, last: int) -> None:
        try:
            self._steps(first, last)
        except BaseException as error:  # noqa: BLE001 (raised again by the thread that waits)
            self._failure = error

    def _steps(self, first: int, last: int) -> None:
        assert self._sample is not None
        for step in range(first, last + 1):
            self._drawn[step] = self._order.drawn
            rollouts = self._sample(step)
            if threading.current_thread() is not self._thread:
                self._graded += rollouts.grade_seconds
            self._ready[step] = rollouts

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {}, {"drawn": min(self._drawn.values(), default=self._order.drawn)}

    def load(self, tensors: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
        self._order.load(tensors, extra)


def works_beside(engine: Engine) -> bool:
    """Whether an engine samples while the learner works: it has devices of its own, and no other rank waits for what
    this one says meanwhile."""
    return engine.is_apart and world_size() == 1


def lag_metrics(lag: int, rollouts: Rollouts, step: int, values: dict[str, float]) -> dict[str, float]:
    """The values of a step, with a lag also how stale its samples were and what their weights leave of them."""
    return values | staleness(rollouts, step) | sample_size(values) if lag else values


def staleness(rollouts: Rollouts, step: int) -> dict[str, float]:
    """How many updates lie between the weights that sampled and those that learn, over the turns of a step."""
    ages = [
        step - 1 - version
        for episode in rollouts.episodes
        for turn in episode.turns
        for _, version in turn.versions
        if turn.finish != "given"
    ]
    return {"staleness/mean": sum(ages) / len(ages), "staleness/max": float(max(ages))} if ages else {}


def sample_size(values: Mapping[str, float]) -> dict[str, float]:
    """The effective sample size as a share: (sum of w)^2 / (n sum of w^2) over the weights of tokens."""
    square = values.get("mismatch/square", 0.0)
    return {"effective_samples": values["mismatch/weight"] ** 2 / square} if square else {}
