"""`rollout.lag`: sampling ahead of the learner. With lag k, all of step t is sampled by version max(0, t - 1 - k).

It is just a schedule: while the engine holds version v, the steps up to v + 1 + k are due. No weights are copied,
nothing is discarded, and pending samples are in their journal, where a resumed run reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lemma.core.ranks import may_go_aside
from lemma.engines.protocol import Engine, EngineError
from lemma.learning.divergence import check_finite
from lemma.models.policy import Policy
from lemma.rollouts import ProblemOrder, RolloutCollector, Rollouts

if TYPE_CHECKING:
    from lemma.stages.reinforcement.sampling_thread import SamplingThread

# How long the end of a stage waits for samples that are no longer needed.
END_SECONDS = 10.0


class StalenessQueue:
    """The rollouts of each step, sampled at most `lag` steps early. Saves how many problems were drawn before the first
    step that is not trained on yet: later ones are drawn again, in the same order, when a run resumes."""

    def __init__(self, order: ProblemOrder, lag: int, total: int):
        self._order, self._lag, self._total = order, lag, total
        self._ready: dict[int, Rollouts] = {}
        self._drawn: dict[int, int] = {}
        self._thread: SamplingThread | None = None
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
            self._task = self._sampling_thread().begin(lambda: self._steps(first, last, is_beside=True))
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

    def drain(self) -> None:
        """The engine is needed for something else."""
        self.wait()

    def settle(self) -> None:
        """The engine is closed: what is being sampled fails, and is not needed."""
        if self._task is not None:
            wait([self._task], END_SECONDS)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.end(END_SECONDS)

    def _sampling_thread(self) -> SamplingThread:
        from lemma.stages.reinforcement.sampling_thread import SamplingThread

        self._thread = self._thread or SamplingThread()
        return self._thread

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
