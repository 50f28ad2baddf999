"""The trainer's side of the agent processes. Nothing here blocks on an agent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from queue import Empty, SimpleQueue
from typing import IO, Any

from lemma.core.descendants import end_session
from lemma.core.errors import UserError
from lemma.core.types import Outcome, Problem

END_SECONDS = 5.0
# Generous, since a process imports the agent's file before it is ready.
START_SECONDS = 300.0
# Bytes of the agents' output that are kept without a log file, bytes read for an error message, and characters that the
# message shows.
MOST_KEPT, LAST_BYTES, SHOWN = 2**20, 2**14, 300


@dataclass(frozen=True, slots=True)
class AgentResult:
    """The result of an agent. It `failed` if it raised, died or took too long; it is `lost` if its process died,
    possibly because of another agent."""

    name: int
    outcome: Outcome
    failed: bool = False
    lost: bool = False


@dataclass(eq=False)
class _Worker:
    """One process. `running` are agents with their time limits, which start when the process is ready; `late` are those
    that ran past theirs and have not ended. If `is_alone`, it runs a single agent."""

    process: subprocess.Popen[bytes]
    is_alone: bool = False
    running: dict[int, float] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)
    begun: dict[int, float] = field(default_factory=dict)
    is_ready: bool = False
    started: float = field(default_factory=time.monotonic)
    _orders: SimpleQueue[bytes | None] = field(default_factory=SimpleQueue)

    @property
    def age(self) -> float:
        return time.monotonic() - self.started

    def overdue(self) -> list[int]:
        """Agents past their time limit."""
        now = time.monotonic()
        return [
            name for name, seconds in self.running.items() if name in self.begun and now > self.begun[name] + seconds
        ]

    def send(self, row: Mapping[str, Any]) -> None:
        self._orders.put(json.dumps(row, default=_plain).encode() + b"\n")

    def speak(self) -> None:
        """Write orders to the pipe until there are no more. The death of a worker is noticed elsewhere."""
        assert self.process.stdin is not None
        with suppress(OSError), self.process.stdin as pipe:
            while (order := self._orders.get()) is not None:
                pipe.write(order)
                pipe.flush()

    def ask_to_end(self) -> None:
        self._orders.put(None)

    def end(self) -> None:
        """End it and all that agents have started."""
        self.ask_to_end()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_SECONDS)
        end_session(self.process.pid)
        self.process.kill()
        self.process.wait()


class AgentPool:
    """Agents in at most `workers` processes, `at_once` in each. A process with an agent past its time limit takes no
    new ones, and is killed as soon as its other agents have ended."""

    def __init__(self, settings: Mapping[str, Any], workers: int, at_once: int, log: str | None = None):
        self._settings = {**settings, "at_once": at_once}
        self._most, self._at_once = workers, at_once
        self._printed: IO[bytes] = open(log, "ab") if log else tempfile.TemporaryFile("a+b")
        self._workers: list[_Worker] = []
        self._news: SimpleQueue[tuple[_Worker, dict[str, Any] | None]] = SimpleQueue()
        self.on_news: Callable[[], None] = lambda: None
        self.is_closed = False
        self._finalizer = weakref.finalize(self, _end_all, self._workers, self._printed)

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
        if self._printed.readable() and os.fstat(self._printed.fileno()).st_size > MOST_KEPT:
            self._printed.truncate(0)
        with suppress(Empty):
            while True:
                worker, row = self._news.get_nowait()
                results += self._died(worker) if row is None else self._heard(worker, row)
        for worker in list(self._workers):
            for name in worker.overdue():
                del worker.running[name]
                worker.late.add(name)
                worker.send({"stop": name})
                results.append(AgentResult(name, Outcome(None, None, "the agent ran past its deadline"), True))
            if (worker.late or worker.is_alone) and not worker.running:
                self._workers.remove(worker)
                threading.Thread(target=worker.end, daemon=True).start()
            elif worker.process.poll() is not None or (not worker.is_ready and worker.age > START_SECONDS):
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
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "lemma.environments.agent_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._printed,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        worker = _Worker(process, alone)
        worker.send(self._settings)
        self._workers.append(worker)
        threading.Thread(target=worker.speak, daemon=True).start()
        threading.Thread(target=_listen, args=(worker, self._news, weakref.ref(self)), daemon=True).start()
        return worker

    def _heard(self, worker: _Worker, row: Mapping[str, Any]) -> list[AgentResult]:
        if "ready" in row:
            worker.is_ready = True
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
        worker.end()
        if not worker.is_ready:
            raise UserError(f"the process of the agents does not begin: {self._last_words()}", fix="repair the agent")
        outcome = Outcome(None, None, "the process of the agent died")
        return [AgentResult(name, outcome, failed=True, lost=True) for name in worker.running]

    def _last_words(self) -> str:
        if not self._printed.readable():
            return "its log says why"
        self._printed.seek(-min(LAST_BYTES, self._printed.seek(0, os.SEEK_END)), os.SEEK_END)
        lines = self._printed.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:SHOWN] if lines else "it said nothing"


def _listen(worker: _Worker, news: SimpleQueue[Any], pool: weakref.ref[AgentPool]) -> None:
    """Forward a worker's messages, and its end."""
    assert worker.process.stdout is not None
    with suppress(OSError, ValueError), worker.process.stdout as pipe:
        for line in pipe:
            news.put((worker, json.loads(line)))
            _wake(pool)
    news.put((worker, None))
    _wake(pool)


def _wake(pool: weakref.ref[AgentPool]) -> None:
    found = pool()
    if found is not None:
        found.on_news()


def _end_all(workers: list[_Worker], printed: IO[bytes]) -> None:
    """Ask all to end before waiting for the first."""
    for worker in workers:
        worker.ask_to_end()
    while workers:
        workers.pop().end()
    printed.close()


def _plain(value: Any) -> Any:
    """What JSON cannot encode: numpy arrays and numbers become lists and numbers, everything else a string."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
