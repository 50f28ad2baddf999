"""What is asked of graders, from any thread and from forked processes.

The exact path runs in the caller, where it is bounded and takes microseconds; what needs sympy goes to a worker process
with limits on CPU time and memory (`lemma/grading/pool.py`). Results are cached by (gold, answer, rules) and returned
in the order of the requests, whatever the timing.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from lemma.grading.grader import PendingGrade
from lemma.grading.pool import WorkerPool
from lemma.grading.quick import quick
from lemma.grading.rules import DEFAULT, Rules
from lemma.grading.tasks import CompatTask, GradingTask, key_of
from lemma.grading.verdict import Kind, Verdict, best_of

# A verdict, its reason, and the seconds that a worker took; 0 if it was cached.
Outcome = tuple[Kind, str, float]

_services: weakref.WeakSet[GradingService] = weakref.WeakSet()


class GradingService:
    """Grades completions; see the module's docstring. Workers start with the first request that needs one, or with
    `start`.

    `cpu_seconds` and `megabytes` limit each comparison by sympy (more seconds on a slow machine); a worker that uses no
    CPU time for `wall_seconds` counts as stuck and is replaced.
    """

    def __init__(
        self,
        workers: int = 1,
        cpu_seconds: float = 2.0,
        wall_seconds: float = 20.0,
        megabytes: int = 1024,
        cache: int = 100_000,
    ):
        assert workers >= 1
        self.workers, self.cpu_seconds, self.wall_seconds, self.megabytes = (
            workers,
            cpu_seconds,
            wall_seconds,
            megabytes,
        )
        self.cache_size = cache
        self.counts: Counter[str] = Counter()
        """Events since the start: asked, cached, started, killed (overruns), lost (through no fault of a task),
        failed."""
        self._cache: OrderedDict[Hashable, Any] = OrderedDict()
        self._begin()
        _services.add(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[Hashable, GradingTask] = {}
        self.pool = WorkerPool(
            self.workers, self.cpu_seconds, self.wall_seconds, self.megabytes, self.counts, self._finish
        )

    # Asking

    def grade(self, prediction: str, gold: str | Sequence[str], rules: Rules = DEFAULT) -> Verdict:
        """The verdict on one completion or bare answer; of several golds, any counts."""
        if not isinstance(gold, str):
            return best_of(self.stream([(prediction, one) for one in gold], rules))
        outcome = quick(prediction, gold, rules)
        return outcome if isinstance(outcome, Verdict) else self.settle(outcome)

    def settle(self, pending: PendingGrade) -> Verdict:
        """The verdict on what the exact path left open."""
        return self.decide(pending).result()

    def submit(self, prediction: str, gold: str, rules: Rules = DEFAULT) -> Future[Verdict]:
        """A future of the verdict; works with `concurrent.futures.as_completed` and `asyncio.wrap_future`."""
        outcome = quick(prediction, gold, rules)
        if isinstance(outcome, PendingGrade):
            return self.decide(outcome)
        result: Future[Verdict] = Future()
        result.set_result(outcome)
        return result

    def decide(self, pending: PendingGrade) -> Future[Verdict]:
        """A future of the verdict on what the exact path left open."""
        result: Future[Verdict] = Future()
        if not pending.rules.symbolic:
            result.set_result(Verdict("wrong", "unreadable", pending.extracted))
            return result

        def done(asked: Future[Outcome]) -> None:
            kind, reason, seconds = asked.result()
            result.set_result(Verdict(kind, reason, pending.extracted, seconds))

        self._ask(pending).add_done_callback(done)
        return result

    def grade_many(self, pairs: Iterable[tuple[str, str]], rules: Rules = DEFAULT) -> list[Verdict]:
        """Verdicts on (prediction, gold) pairs, in their order."""
        return list(self.stream(pairs, rules))

    def stream(self, pairs: Iterable[tuple[str, str]], rules: Rules = DEFAULT) -> Iterator[Verdict]:
        """Like `grade_many`, one by one; later pairs are graded while earlier verdicts are awaited."""
        ahead: deque[Future[Verdict]] = deque()
        for prediction, gold in pairs:
            ahead.append(self.submit(prediction, gold, rules))
            while ahead and (len(ahead) > 4096 or ahead[0].done()):
                yield ahead.popleft().result()
        for future in ahead:
            yield future.result()

    def compat(self, name: str, response: str, gold: str | Sequence[str], compat: bool = True) -> Any:
        """The score of a grader of another system, in a worker.

        A response that exceeds a limit scores like an empty one; None if the gold does, or if no worker is left.
        """
        golds = gold if isinstance(gold, str) else tuple(gold)
        return self._ask(CompatTask(name, response, golds, compat)).result()

    def _ask(self, question: PendingGrade | CompatTask) -> Future[Any]:
        key = key_of(question)
        with self._lock:
            self.counts["asked"] += 1
            if key in self._cache:
                self.counts["cached"] += 1
                self._cache.move_to_end(key)
                future: Future[Any] = Future()
                future.set_result(self._cache[key])
                return future
            if key in self._waiting:
                return self._waiting[key].future
            task = GradingTask(question)
            self.pool.put(task)
            self._waiting[key] = task
        return task.future

    def _finish(self, task: GradingTask, outcome: Any, keep: bool) -> None:
        key, is_verdict = key_of(task.question), isinstance(task.question, PendingGrade)
        with self._lock:
            self._waiting.pop(key, None)
            if self.cache_size and keep:
                self._cache[key] = (*outcome, 0.0) if is_verdict else outcome
                if len(self._cache) > self.cache_size:
                    self._cache.popitem(last=False)
        if isinstance(outcome, RuntimeError):
            task.future.set_exception(outcome)
            return
        task.future.set_result((*outcome, task.seconds) if is_verdict else outcome)

    # Starting and ending

    def start(self) -> None:
        """Start all workers now, so that no request has to wait for one; does not wait until they are ready."""
        self.pool.start()

    def close(self) -> None:
        """Finish what is queued, then end the workers."""
        self.pool.close()

    def __enter__(self) -> GradingService:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _after_fork(self) -> None:
        """In a forked child: start over, keep the cache."""
        self.pool.forget()
        self._begin()


def _after_fork_in_child() -> None:
    global _default_lock
    _default_lock = threading.Lock()
    for service in list(_services):
        service._after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)

_default: GradingService | None = None
_default_lock = threading.Lock()


def default_service() -> GradingService:
    """The service behind `lemma.grade`: one worker, started when the first answer needs sympy."""
    global _default
    with _default_lock:
        if _default is None:
            _default = GradingService()
            atexit.register(_default.close)
        return _default


def grade(prediction: str, gold: str | float | Sequence[str | float | None] | None, rules: Rules = DEFAULT) -> Verdict:
    """Whether a completion, or a bare answer, gives the gold answer, or one of several; a number is taken as its text.

    The exact path runs here; what needs sympy runs in a worker process with limits on CPU time and memory.
    """
    if gold is None or isinstance(gold, int | float):
        gold = "" if gold is None else str(gold)
    if not isinstance(gold, str):
        return best_of(grade(prediction, one, rules) for one in gold)
    outcome = quick(prediction, gold, rules)
    return outcome if isinstance(outcome, Verdict) else default_service().settle(outcome)
