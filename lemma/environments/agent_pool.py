"""The trainer's side of the agent processes. Nothing here blocks on an agent."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from queue import Empty, SimpleQueue
from typing import IO, Any

from lemma.children import ChildGone, PythonChild
from lemma.core.errors import UserError
from lemma.core.types import Outcome, Problem

# Generous, since a process imports the agent's file before it is ready.
START_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class AgentResult:
    """The result of an agent. It `failed` if it raised, died or took too long; it is `lost` if its process died,
    possibly because of another agent."""

    name: int
    outcome: Outcome
    failed: bool = False
    lost: bool = False


class _Worker(PythonChild):
    """One process. `running` are agents with their time limits, which start when the process is ready; `late` are those
    that ran past theirs and have not ended. If `is_alone`, it runs a single agent."""

    def __init__(self, is_alone: bool, log: IO[bytes] | None):
        super().__init__("lemma.environments.agent_worker:serve", stderr=log)
        self.is_alone = is_alone
        self.running: dict[int, float] = {}
        self.late: set[int] = set()
        self.begun: dict[int, float] = {}

    @property
    def is_overdue(self) -> bool:
        return not self.is_ready and time.monotonic() > self.started + START_SECONDS

    def overdue(self) -> list[int]:
        """Agents past their time limit."""
        now = time.monotonic()
        return [
            name for name, seconds in self.running.items() if name in self.begun and now > self.begun[name] + seconds
        ]

    def send(self, message: Any) -> None:
        with suppress(ChildGone):  # which is noticed elsewhere
            super().send(message)


class AgentPool:
    """Agents in at most `workers` processes, `at_once` in each. A process with an agent past its time limit takes no
    new ones, and is killed as soon as its other agents have ended."""

    def __init__(self, settings: Mapping[str, Any], workers: int, at_once: int, log: str | None = None):
        self._settings = {**settings, "at_once": at_once}
        self._most, self._at_once = workers, at_once
        self._log = open(log, "ab") if log else None
        self._workers: list[_Worker] = []
        self._news: SimpleQueue[tuple[_Worker, dict[str, Any] | None]] = SimpleQueue()
        self.on_news: Callable[[], None] = lambda: None
        self.is_closed = False
        self._finalizer = weakref.finalize(self, _end_all, self._workers, self._log)

    def has_room(self, alone: bool) -> bool:
        fit = self._fit(alone)
        return len(fit) < self._most or (not alone and any(len(worker.running) < self._at_once for worker in fit))

    def _fit(self, alone: bool) -> list[_Worker]:
        return [worker for worker in self._workers if worker.is_alone == alone and not worker.late]

    def begin(
        self, name: int, problem: Problem, seed: int, base_url: str, api_key: str, seconds: float, alone: bool = False
    ) -> None:
        """Start an agent in the least loaded process, or in its own."""
        fit = self._fit(alone)
        worker = min(fit, key=lambda one: len(one.running), default=None)
        if worker is None or alone or (worker.running and len(fit) < self._most):
            worker = self._start(alone)
        worker.running[name] = seconds
        if worker.is_ready:
            worker.begun[name] = time.monotonic()
        order = {"id": name, "problem": asdict(problem), "seed": seed, "base_url": base_url, "api_key": api_key}
        worker.send(order)

    def look(self) -> list[AgentResult]:
        """Results of agents that ended or ran past their time limit since the last call."""
        results: list[AgentResult] = []
        with suppress(Empty):
            while True:
                worker, row = self._news.get_nowait()
                results += self._died(worker) if row is None else self._heard(worker, row)
        for worker in list(self._workers):
            with suppress(ChildGone):
                worker.write()
            for name in worker.overdue():
                del worker.running[name]
                worker.late.add(name)
                worker.send({"stop": name})
                results.append(AgentResult(name, Outcome(None, None, "the agent ran past its deadline"), True))
            if (worker.late or worker.is_alone) and not worker.running:
                self._workers.remove(worker)
                threading.Thread(target=worker.end, daemon=True).start()
            elif worker.is_overdue:
                results += self._died(worker)
        return results

    def settle(self) -> None:
        """End every process with a running agent."""
        for worker in [one for one in self._workers if one.running or one.late]:
            self._workers.remove(worker)
            worker.end()

    def close(self) -> None:
        self.is_closed = True
        self._finalizer()

    def _start(self, alone: bool) -> _Worker:
        worker = _Worker(alone, self._log)
        self._workers.append(worker)
        news, pool = self._news, weakref.ref(self)

        def put(row: dict[str, Any] | None) -> None:
            news.put((worker, row))
            if (found := pool()) is not None:
                found.on_news()

        worker.listen(put)
        worker.send(self._settings)
        return worker

    def _heard(self, worker: _Worker, row: Mapping[str, Any]) -> list[AgentResult]:
        if "ready" in row:
            worker.begun = dict.fromkeys(worker.running, time.monotonic())
            return []
        for trouble in ("fatal", "wrong"):
            if trouble in row:
                raise UserError(row[trouble], fix="repair the agent")
        worker.late.discard(row["id"])
        if worker.running.pop(row["id"], None) is None:
            return []
        if "outcome" in row:
            return [AgentResult(row["id"], Outcome(*row["outcome"]))]
        return [AgentResult(row["id"], Outcome(None, None, f"the agent failed: {row['failed']}"), True)]

    def _died(self, worker: _Worker) -> list[AgentResult]:
        if worker not in self._workers:
            return []
        self._workers.remove(worker)
        why = worker.last_words()
        worker.end()
        if not worker.is_ready:
            raise UserError(f"the process of the agents does not begin ({why})", fix="repair the agent")
        outcome = Outcome(None, None, "the process of the agent died")
        return [AgentResult(name, outcome, failed=True, lost=True) for name in worker.running]


def _end_all(workers: list[_Worker], log: IO[bytes] | None) -> None:
    """Ask all to end before waiting for the first."""
    for worker in workers:
        worker.ask_to_end()
    while workers:
        workers.pop().end()
    if log is not None:
        log.close()
