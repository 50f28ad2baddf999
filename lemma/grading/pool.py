"""Grading workers: one thread for each process, which is killed and replaced when it overruns.

A worker lost for external reasons never counts against an answer.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from time import perf_counter
from typing import Any

from lemma.children import ChildGone
from lemma.grading.grader import unread
from lemma.grading.process import START_SECONDS, GradingProcess
from lemma.grading.tasks import PROBE, CompatTask, GradingTask, message_of

_SOON = 0.25
"""Seconds after which a task is late, so that others need not wait for its worker."""
_SPARE = 3
"""How many workers there may be beyond those asked for, while as many are late."""
_TRIES = 3
"""How many workers may be lost on one task, or during their start, before its verdict is unknown."""


class WorkerPool:
    """Has tasks answered, and tells `finish` of each: the task, its outcome, and whether that is worth remembering.

    The limits are those of `GradingService`. `counts` gets what happens: started, killed, lost, failed. `live` are the
    worker processes by the number of their thread.
    """

    def __init__(
        self,
        workers: int,
        cpu_seconds: float,
        wall_seconds: float,
        megabytes: int,
        counts: Counter[str],
        finish: Callable[[GradingTask, Any, bool], None],
    ):
        self._workers, self._counts, self._finish = workers, counts, finish
        self._cpu_seconds, self._wall_seconds, self._megabytes = cpu_seconds, wall_seconds, megabytes
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[GradingTask | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self.live: dict[int, GradingProcess] = {}
        self._late = 0
        self._closed = self._ended = False

    def put(self, task: GradingTask) -> None:
        with self._lock:
            assert not self._closed, "the grading service is closed"
            self._add_needed()
            self._queue.put(task)

    def start(self) -> None:
        """Start all workers now, so that no request has to wait for one; does not wait until they are ready."""
        with self._lock:
            assert not self._closed, "the grading service is closed"
            started = [self._add_thread() for _ in range(len(self._threads), self._workers)]
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
            self.live[place] = self._new_worker()
        started.set()
        while (task := self._queue.get()) is not None:
            self._work(place, task)
            if place not in self.live and not self._closed:  # Others take the next task while this one starts again.
                with suppress(ChildGone, OSError):
                    self._worker(place, 1)
        self._drop(place)

    def _work(self, place: int, task: GradingTask) -> None:
        answer = self._asked(place, message_of(task.question))
        if answer is None or "trouble" in answer:
            self._finish(task, task.unknown, False)
            return
        task.seconds = answer.get("seconds", 0.0)
        if "overrun" in answer or "error" in answer:
            self._blame(place, task, answer)
        else:
            self._finish(task, answer["score"] if "score" in answer else (answer["kind"], answer["reason"]), True)

    def _asked(self, place: int, message: dict[str, Any]) -> dict[str, Any] | None:
        """A worker's answer, with the seconds that it took; None if workers are lost on it for external reasons."""
        for _ in range(_TRIES):
            try:
                worker = self._worker(place)
            except (ChildGone, OSError):
                break
            try:
                worker.tell(message, self._wall_seconds)
                begin = perf_counter()
                answer = self._answer(worker)
                return {**answer, "seconds": perf_counter() - begin}
            except (ChildGone, OSError):
                own = worker.hit_cpu_limit()
                self._drop(place)
                if own:
                    return {"overrun": "cpu"}
                self._counts["lost"] += 1
        return None

    def _answer(self, worker: GradingProcess) -> dict[str, Any]:
        """A worker's answer; while it is late, another worker may start for what waits behind it."""
        is_late = not worker.speaks_within(_SOON)
        with self._lock:
            self._late += is_late
            if is_late and not self._queue.empty():
                self._add_needed()
        try:
            return worker.receive(self._wall_seconds)
        finally:
            with self._lock:
                self._late -= is_late

    def _add_needed(self) -> None:
        """One more thread, if fewer than the workers asked for are not late."""
        if not self._closed and len(self._threads) < self._workers + min(self._late, _SPARE):
            self._add_thread()

    def _blame(self, place: int, task: GradingTask, answer: dict[str, Any]) -> None:
        """Neither an overrun nor an error decides anything."""
        self._counts["killed" if "overrun" in answer else "failed"] += 1
        self._drop(place)
        if not self._closed:
            self.live[place] = self._new_worker()  # it imports while nobody waits for it
        if isinstance(task.question, CompatTask):
            self._blame_compat(place, task, task.question, answer)
            return
        reason = "grader" if "error" in answer else "gold_limit" if unread(task.question.gold) else "limit"
        self._finish(task, ("unknown", reason), True)

    def _blame_compat(self, place: int, task: GradingTask, question: CompatTask, answer: dict[str, Any]) -> None:
        """None if the gold overruns with any answer, otherwise the score of an empty response."""
        if "error" in answer:
            self._finish(task, RuntimeError(f"grader {question.name}: {answer['error']}"), False)
            return
        message = message_of(question)
        alone = self._asked(place, {**message, "response": PROBE})
        if alone is not None and "score" in alone:
            alone = self._asked(place, {**message, "response": ""})
        score = None if alone is None else alone.get("score")
        self._finish(task, score, alone is not None and "trouble" not in alone)

    def _worker(self, place: int, tries: int = _TRIES) -> GradingProcess:
        """A worker that is ready; raises if none can be started."""
        worker = self.live.get(place)
        if worker is None or not worker.is_alive:
            self._drop(place)
            worker = self.live[place] = self._new_worker()
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
        self._counts["started"] += 1
        return GradingProcess(self._cpu_seconds, self._megabytes)

    def _drop(self, place: int) -> None:
        worker = self.live.pop(place, None)
        if worker is not None:
            worker.end()

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
            thread.join(self._wall_seconds)
        self._ended = True
        for place in list(self.live):
            self._drop(place)

    def forget(self) -> None:
        """In a forked child: the threads are gone, and the workers are the parent's."""
        for worker in self.live.values():
            worker.forget()
