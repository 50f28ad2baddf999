"""`rollout.lag`: sampling ahead of the learner. With lag k, all of step t is sampled by version max(0, t - 1 - k).

It is just a schedule: while the engine holds version v, the steps up to v + 1 + k are due. No weights are copied,
nothing is discarded, and pending samples are in their journal, where a resumed run reads them.

With `flying`, an update does not wait for responses: they continue with the new weights.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, Literal

from lemma.algorithms import Algorithm
from lemma.core.errors import UserError
from lemma.core.ranks import aside, may_go_aside
from lemma.core.thread_gpu import gpu_of_thread, use_gpu
from lemma.engines.protocol import Engine, EngineError
from lemma.learning.divergence import check_finite
from lemma.models.policy import Policy
from lemma.rollouts import ProblemOrder, RolloutCollector, Rollouts
from lemma.stages.reinforcement.rl_options import ReinforcementOptions

# How long the end of a stage waits for samples that are no longer needed.
END_SECONDS = 10.0


def corrected(options: ReinforcementOptions) -> Algorithm:
    """The stage's algorithm; samples of older versions get truncated weights old / behaviour, unless it has its own cap
    or already weights whole samples."""
    algorithm, rollout = options.algorithm, options.rollout
    has_weights = getattr(algorithm, "mismatch_cap", 0.0) is None and getattr(algorithm, "gain", "") != "vespo"
    if not rollout.lag or rollout.lag_cap is None or not has_weights:
        return algorithm
    return algorithm.model_copy(update={"mismatch_cap": rollout.lag_cap})


def make_ahead(options: ReinforcementOptions, order: ProblemOrder, total: int) -> Ahead | Flying:
    rollout = options.rollout
    return Flying(order, rollout.lag_limit, total) if rollout.lag == "flying" else Ahead(order, rollout.lag, total)


class Ahead:
    """The rollouts of each step, sampled at most `lag` steps early. Saves how many problems were drawn before the first
    step that is not trained on yet: later ones are drawn again, in the same order, when a run resumes."""

    def __init__(self, order: ProblemOrder, lag: int, total: int):
        self._order, self._lag, self._total = order, lag, total
        self._ready: dict[int, Rollouts] = {}
        self._drawn: dict[int, int] = {}
        self._thread: _SamplingThread | None = None
        self._task: Future[None] | None = None
        self._sample: Callable[[int], Rollouts] | None = None
        self._policy: Policy | None = None
        self._is_beside = False
        self._graded = 0.0

    def use(self, collector: RolloutCollector, policy: Policy, engine: Engine) -> None:
        """Sample with these. If the engine needs nothing of the learner's, it samples while the learner works."""
        self._policy = policy
        self.sample_by(collector.step, is_beside=samples_alongside(engine))

    def sample_by(self, sample: Callable[[int], Rollouts], *, is_beside: bool) -> None:
        self._sample, self._is_beside = sample, is_beside and self._lag > 0

    def take(self, step: int) -> Rollouts:
        """The rollouts of this step. The others that are due follow: at once, or while the learner works. Grading time
        counts where it is waited for."""
        self.wait()
        self._graded = 0.0
        with blame_divergence(self._policy):
            self._steps(max(self._drawn, default=step - 1) + 1, step)
        first, last = max(self._drawn) + 1, min(step + self._lag, self._total)
        del self._drawn[step]
        if self._is_beside and first <= last:
            self._thread = self._thread or _SamplingThread()
            self._task = self._thread.begin(lambda: self._steps(first, last, is_beside=True))
        else:
            with blame_divergence(self._policy):
                self._steps(first, last)
        rollouts = self._ready.pop(step)
        rollouts.grade_seconds = self._graded
        return rollouts

    @property
    def is_sampling(self) -> bool:
        """Whether the engine is busy: then it may not sleep."""
        return self._task is not None

    def wait(self) -> None:
        """Wait until nothing is being sampled: the engine may then take new weights, or other work."""
        task, self._task = self._task, None
        if task is not None:
            with blame_divergence(self._policy):
                task.result()

    def land(self) -> None:
        """The engine is needed for something else."""
        self.wait()

    def settle(self) -> None:
        """The engine is closed: what is being sampled fails, and is not needed."""
        if self._task is not None:
            wait([self._task], END_SECONDS)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.end()

    def _steps(self, first: int, last: int, is_beside: bool = False) -> None:
        assert self._sample is not None
        for step in range(first, last + 1):
            self._drawn[step] = self._order.drawn
            rollouts = self._sample(step)
            if not is_beside:
                self._graded += rollouts.grade_seconds
            self._ready[step] = rollouts

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {}, {"drawn": min(self._drawn.values(), default=self._order.drawn)}

    def load(self, tensors: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
        self._order.load(tensors, extra)


class _SamplingThread:
    """One thread for all steps: workers of graders and environments do not outlive the thread that starts them. Rewards
    run in it, on the GPU of the thread that made it."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, args=(gpu_of_thread(),), name="sampling ahead", daemon=True)
        self._thread.start()

    def begin(self, work: Callable[[], None]) -> Future[None]:
        """Run this in the thread; asking for the result waits for it, and re-raises its exception."""
        future: Future[None] = Future()
        self._tasks.put((work, future))
        return future

    def end(self) -> None:
        self._tasks.put(None)
        self._thread.join(timeout=END_SECONDS)

    def _work(self, gpu: int | None) -> None:
        use_gpu(gpu)
        while (task := self._tasks.get()) is not None:
            work, future = task
            try:
                with aside():
                    work()
                future.set_result(None)
            except BaseException as error:  # noqa: BLE001 (raised again by the thread that waits)
                future.set_exception(error)


class Flying:
    """The rollouts of each step, with responses that continue across updates. Those of a step began at most `limit`
    steps before it, so no token is older when it is trained on. The journal of a step records its problems."""

    is_sampling = True

    def __init__(self, order: ProblemOrder, limit: int, total: int):
        self._order, self._limit, self._total = order, limit, total
        self._has_begun = False
        self._collector: RolloutCollector | None = None
        self._policy: Policy | None = None

    def use(self, collector: RolloutCollector, policy: Policy, engine: Engine) -> None:
        if not engine.updates_in_flight:
            raise UserError(
                f"`rollout.lag: flying` needs responses that continue after an update, which the engine {engine.name} "
                "does not support here",
                fix="write `engine: native`, vLLM with `mode: server`, or `lag: 1`",
            )
        self._collector, self._policy = collector, policy

    def take(self, step: int) -> Rollouts:
        assert self._collector is not None and self._policy is not None
        if not self._has_begun:
            self._collector.go_on_after(step - 1)
        self._has_begun = True
        with blame_divergence(self._policy):
            return self._collector.step(step, min(step + self._limit, self._total))

    def wait(self) -> None:
        """An update waits for nothing."""

    def land(self) -> None:
        """The engine is needed for something else: finish what has begun."""
        assert self._collector is not None
        self._collector.land()

    def settle(self) -> None:
        """The engine is closed, along with the responses in flight."""

    def close(self) -> None:
        """Nothing is left."""

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {}, {"drawn": self._order.drawn}

    def load(self, tensors: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
        self._order.load(tensors, extra)


@contextmanager
def blame_divergence(policy: Policy | None) -> Iterator[None]:
    """Context in which a failing engine is not blamed if the policy has diverged. Only the learner's thread checks the
    policy, since it may be in the middle of a pass."""
    try:
        yield
    except EngineError:
        if policy is not None:
            check_finite(policy)
        raise


def samples_alongside(engine: Engine) -> bool:
    """Whether an engine samples while the learner works: it has its own devices and, with several ranks, the sampling
    threads can communicate while the learners do."""
    return engine.has_own_devices and may_go_aside()


def lag_metrics(
    lag: int | Literal["flying"], rollouts: Rollouts, step: int, values: dict[str, float]
) -> dict[str, float]:
    """The metrics of a step; with a lag, also how stale its samples were and their effective sample size."""
    return values | staleness(rollouts, step) | sample_size(values) if lag else values


def staleness(rollouts: Rollouts, step: int) -> dict[str, float]:
    """How many updates lie between the weights that sampled a token and those that are trained on it; and the share of
    responses sampled by several versions."""
    turns = [turn for episode in rollouts.episodes for turn in episode.turns if turn.finish != "given"]
    tokens: Counter[int] = Counter()
    for turn in turns:
        ends = [*(first for first, _ in turn.versions[1:]), len(turn.ids)]
        for (first, version), end in zip(turn.versions, ends, strict=True):
            tokens[step - 1 - version] += end - max(first, turn.given)
    ages = +tokens
    if not ages:
        return {}
    return {
        "staleness/mean": sum(age * count for age, count in ages.items()) / ages.total(),
        "staleness/max": float(max(ages)),
        "staleness/mixed": sum(len(turn.versions) > 1 for turn in turns) / len(turns),
    }


def sample_size(values: Mapping[str, float]) -> dict[str, float]:
    """The effective sample size as a share: (sum of w)^2 / (n sum of w^2) over the weights of tokens."""
    square = values.get("mismatch/square", 0.0)
    return {"effective_samples": values["mismatch/weight"] ** 2 / square} if square else {}
