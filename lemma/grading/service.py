"""A pool of grading workers that can be killed: usable from any thread and from forked processes.

The exact path runs in the caller, where it is bounded and takes microseconds; what needs sympy goes to a worker process
with limits on CPU time and memory, which is killed and replaced when it overruns. A worker lost for external reasons
never counts against an answer. Results are cached by (gold, answer, rules) and returned in the order of the requests,
whatever the timing.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from time import perf_counter
from typing import Any

from lemma.children import ChildGone
from lemma.grading.grader import PendingGrade, quick, unread
from lemma.grading.process import START_SECONDS, GradingProcess
from lemma.grading.rules import DEFAULT, Rules
from lemma.grading.tasks import PROBE, CompatTask, GradingTask, key_of, message_of
from lemma.grading.verdict import Kind, Verdict, best_of

# A verdict, its reason, and the seconds that a worker took; 0 if it was cached.
Outcome = tuple[Kind, str, float]
_SOON = 0.25
"""Seconds after which a task is late, so that others need not wait for its worker."""
_SPARE = 3
"""How many workers there may be beyond those asked for, while as many are late."""
_TRIES = 3
"""How many workers may be lost on one task, or during their start, before its verdict is unknown."""


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
        self._queue: queue.SimpleQueue[GradingTask | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._live: dict[int, GradingProcess] = {}
        self._waiting: dict[Hashable, GradingTask] = {}
        self._late = 0
        self._closed = self._ended = False

    # Asking

    def grade(self, prediction: str, gold: str | Sequence[str], rules: Rules = DEFAULT) -> Verdict:
        """The verdict on one completion or bare answer; of several golds, any counts."""
        if not isinstance(gold, str):
            return best_of(self.stream([(prediction, one) for one in gold], rules))
        outcome = quick(prediction, gold, rules)
        return outcome if isinstance(outcome, Verdict) else self.settle(outcome)

    def settle(self, pending: PendingGrade) -> Verdict:
        """The verdict on what the exact path left open."""
        return self._submit(pending).result()

    def submit(self, prediction: str, gold: str, rules: Rules = DEFAULT) -> Future[Verdict]:
        """A future of the verdict; works with `concurrent.futures.as_completed` and `asyncio.wrap_future`."""
        outcome = quick(prediction, gold, rules)
        if isinstance(outcome, PendingGrade):
            return self._submit(outcome)
        result: Future[Verdict] = Future()
        result.set_result(outcome)
        return result

    def _submit(self, pending: PendingGrade) -> Future[Verdict]:
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
            assert not self._closed, "the grading service is closed"
            task = GradingTask(question)
            self._waiting[key] = task
            self._add_needed()
        self._queue.put(task)
        return task.future

    # Working

    def start(self) -> None:
        """Start all workers now, so that no request has to wait for one; does not wait until they are ready."""
        with self._lock:
            assert not self._closed, "the grading service is closed"
            started = [self._add_thread() for _ in range(len(self._threads), self.workers)]
        for event in started:
            event.wait()

    def _add_thread(self) -> threading.Event:
        """Start a thread for one more worker; the returned event is set once its process has started."""
        started = threading.Event()
        thread = threading.Thread(target=self._run, args=(len(self._threads), started), daemon=True, name="grading")
        self._threads.append(thread)
        thread.start()
        return started

    def _run(self, place: int, started: threading.Event) -> None:
        """One thread for one worker, which ends with its thread: take a task, have it answered."""
        with suppress(ChildGone, OSError):
            self._live[place] = self._new_worker()
        started.set()
        while (task := self._queue.get()) is not None:
            self._work(place, task)
            if place not in self._live and not self._closed:  # Others take the next task while this one starts again.
                with suppress(ChildGone, OSError):
                    self._worker(place, 1)
        self._drop(place)

    def _work(self, place: int, task: GradingTask) -> None:
        answer = self._asked(place, message_of(task.question))
        if answer is None or "trouble" in answer:
            self._finish(task, task.unknown, keep=False)
            return
        task.seconds = answer.get("seconds", 0.0)
        if "overrun" in answer or "error" in answer:
            self._blame(place, task, answer)
        else:
            self._finish(task, answer["score"] if "score" in answer else (answer["kind"], answer["reason"]))

    def _asked(self, place: int, message: dict[str, Any]) -> dict[str, Any] | None:
        """A worker's answer, with the seconds that it took; None if workers are lost on it for external reasons."""
        for _ in range(_TRIES):
            try:
                worker = self._worker(place)
            except (ChildGone, OSError):
                break
            try:
                worker.tell(message, self.wall_seconds)
                begin = perf_counter()
                answer = self._answer(worker)
                return {**answer, "seconds": perf_counter() - begin}
            except (ChildGone, OSError):
                own = worker.hit_cpu_limit()
                self._drop(place)
                if own:
                    return {"overrun": "cpu"}
                self.counts["lost"] += 1
        return None

    def _answer(self, worker: GradingProcess) -> dict[str, Any]:
        """A worker's answer; while it is late, another worker may start for what waits behind it."""
        is_late = not worker.speaks_within(_SOON)
        with self._lock:
            self._late += is_late
            if is_late and not self._queue.empty():
                self._add_needed()
        try:
            return worker.receive(self.wall_seconds)
        finally:
            with self._lock:
                self._late -= is_late

    def _add_needed(self) -> None:
        """One more thread, if fewer than the workers asked for are not late."""
        if not self._closed and len(self._threads) < self.workers + min(self._late, _SPARE):
            self._add_thread()

    def _blame(self, place: int, task: GradingTask, answer: dict[str, Any]) -> None:
        """Whose fault an overrun is: the answer's if the exact path reads all of the gold, otherwise nobody's; after an
        error, the gold's if it alone makes one too."""
        self.counts["killed" if "overrun" in answer else "failed"] += 1
        self._drop(place)
        if not self._closed:
            self._live[place] = self._new_worker()  # it imports while nobody waits for it
        if isinstance(task.question, CompatTask):
            self._blame_compat(place, task, task.question, answer)
            return
        if "overrun" in answer:
            outcome = ("unknown", "gold_limit") if unread(task.question.gold) else ("wrong", "limit")
            self._finish(task, outcome)
            return
        alone = self._asked(place, {"op": "probe", "gold": task.question.gold})
        if alone is None or "trouble" in alone:
            self._finish(task, task.unknown, keep=False)
        elif "kind" not in alone:
            self._finish(task, ("unknown", "gold_limit"))
        else:
            self._finish(task, ("wrong", "unreadable"))

    def _blame_compat(self, place: int, task: GradingTask, question: CompatTask, answer: dict[str, Any]) -> None:
        """None if the gold overruns with any answer, otherwise the score of an empty response."""
        if "error" in answer:
            with self._lock:
                self._waiting.pop(key_of(question), None)
            task.future.set_exception(RuntimeError(f"grader {question.name}: {answer['error']}"))
            return
        message = message_of(question)
        alone = self._asked(place, {**message, "response": PROBE})
        if alone is not None and "score" in alone:
            alone = self._asked(place, {**message, "response": ""})
        score = None if alone is None else alone.get("score")
        self._finish(task, score, keep=alone is not None and "trouble" not in alone)

    def _worker(self, place: int, tries: int = _TRIES) -> GradingProcess:
        """A worker that is ready; raises if none can be started."""
        worker = self._live.get(place)
        if worker is None or not worker.is_alive:
            self._drop(place)
            worker = self._live[place] = self._new_worker()
        try:
            worker.wait_until_ready(START_SECONDS)
        except ChildGone:
            if tries > 1:
                return self._worker(place, tries - 1)
            raise
        return worker

    def _new_worker(self) -> GradingProcess:
        if self._ended:
            raise ChildGone("the service has ended")
        self.counts["started"] += 1
        return GradingProcess(self.cpu_seconds, self.megabytes)

    def _drop(self, place: int) -> None:
        worker = self._live.pop(place, None)
        if worker is not None:
            worker.end()

    def _finish(self, task: GradingTask, outcome: Any, keep: bool = True) -> None:
        key, is_verdict = key_of(task.question), isinstance(task.question, PendingGrade)
        with self._lock:
            self._waiting.pop(key, None)
            if self.cache_size and keep:
                self._cache[key] = (*outcome, 0.0) if is_verdict else outcome
                if len(self._cache) > self.cache_size:
                    self._cache.popitem(last=False)
        task.future.set_result((*outcome, task.seconds) if is_verdict else outcome)

    # Ending

    def close(self) -> None:
        """Finish what is queued, then end the workers."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            threads = list(self._threads)
        for _ in threads:
            self._queue.put(None)
        for thread in threads:
            thread.join(self.wall_seconds)
        self._ended = True
        for place in list(self._live):
            self._drop(place)

    def __enter__(self) -> GradingService:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _after_fork(self) -> None:
        """In a forked child: the threads are gone and the workers are the parent's; start over, keep the cache."""
        for worker in self._live.values():
            worker.forget()
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
