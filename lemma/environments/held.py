"""One environment as its episode sees it, its running call, and the process it lives in."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from lemma.core.types import Problem
from lemma.environments.environment import Reply, Utterance
from lemma.environments.room import Call
from lemma.environments.worker_process import WorkerProcess

# Seconds beyond the deadline for a call that ends itself there, and for an answer that has not been read yet.
GRACE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Failure:
    """A call without a result. With `is_limit` the action is to blame; otherwise the outcome is unknown."""

    reason: str
    is_limit: bool = False


@dataclass(slots=True, eq=False)
class Held:
    """One environment as its episode sees it. `said` and `heard` are the turns and replies for replaying and checking a
    fresh world."""

    number: int
    problem: Problem
    seed: int
    answer: Any = None
    """The result of the last call: messages, a reply, an outcome, or a failure."""
    seconds: float = 0.0
    """Time that its calls took."""
    said: list[Utterance] = field(default_factory=list)
    heard: list[Reply] = field(default_factory=list)
    call: Call | None = None
    saying: Utterance | None = None
    home: WorldHome | None = None
    breaks: int = 0
    lost_replays: int = 0
    is_alone: bool = False
    is_left: bool = False


@dataclass(slots=True)
class Flight:
    """A call that was sent: when, and the deadline of its answer."""

    held: Held
    began: float
    deadline: float
    replays: bool
    is_spared: bool = False


class WorldHome:
    """One process with the environments in it: a worker, or the trainer itself."""

    def __init__(self, worker: WorkerProcess | None):
        self.worker = worker
        self.started = time.monotonic()
        self.holds: dict[int, Held] = {}
        self.queue: deque[Held] = deque()
        self.flights: dict[int, Flight] = {}

    @property
    def is_ready(self) -> bool:
        return self.worker is None or self.worker.is_ready

    def late(self, now: float, was_away: bool) -> set[int]:
        """Numbers of the environments whose deadlines have passed. If an answer may be waiting unread, because the
        workers were not polled, or is being received, its deadline is extended."""
        is_coming = self.worker is not None and self.worker.is_speaking
        if self.worker is not None:
            self.worker.is_speaking = False
        late = {number: flight for number, flight in self.flights.items() if flight.deadline <= now}
        for number, flight in list(late.items()):
            if is_coming or (was_away and not flight.is_spared):
                flight.deadline, flight.is_spared = now + GRACE_SECONDS, True
                del late[number]
        return set(late)

    @property
    def load(self) -> int:
        return len(self.holds) + len(self.queue)
