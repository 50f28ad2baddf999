"""One environment as its episode sees it, its running call, and the process that it lives in."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lemma.core.types import Message, Outcome, Problem
from lemma.environments.env_server import Call
from lemma.environments.environment import Action, Observation
from lemma.environments.worker_process import WorkerProcess

if TYPE_CHECKING:
    from lemma.environments.env_pool import EnvPool

# Seconds beyond the deadline for a call that ends itself there, and for an answer that has not been read yet.
GRACE_SECONDS = 2.0


class EnvFailure(Exception):
    """A call without a result. With `is_limit` the action is to blame; otherwise the outcome is unknown."""

    def __init__(self, reason: str, is_limit: bool = False):
        super().__init__(reason)
        self.reason, self.is_limit = reason, is_limit


@dataclass(slots=True, eq=False)
class EnvHandle:
    """One environment as its episode sees it: one call at a time, each to be awaited; always `leave` it.

    `actions` and `observations` are for replaying and checking a fresh environment.
    """

    pool: EnvPool
    number: int
    problem: Problem
    seed: int
    seconds: float = 0.0
    """Time that its calls took."""
    actions: list[Action] = field(default_factory=list)
    observations: list[Observation] = field(default_factory=list)
    call: Call | None = None
    action: Action | None = None
    worker: EnvWorker | None = None
    breaks: int = 0
    lost_replays: int = 0
    is_alone: bool = False
    is_left: bool = False
    result: asyncio.Future[Any] | None = None

    def reset(self) -> Awaitable[tuple[Message, ...]]:
        """Begin the episode: the messages that follow the problem's own. Every call raises EnvFailure where there is no
        result."""
        return self.pool.call(self, "reset")

    def step(self, action: Action) -> Awaitable[Observation]:
        self.action = action
        return self.pool.call(self, "step")

    def score(self) -> Awaitable[Outcome]:
        return self.pool.call(self, "score")

    def leave(self) -> None:
        """The episode is over: the environment is closed, once a running call has ended."""
        self.pool.leave(self)

    async def left(self) -> None:
        """As `leave`, and wait until it is closed."""
        self.leave()
        if self.call is not None:
            self.result = asyncio.get_running_loop().create_future()
            await self.result


@dataclass(slots=True)
class Flight:
    """A call that was sent: when, and the deadline of its answer."""

    handle: EnvHandle
    began: float
    deadline: float
    replays: bool
    is_spared: bool = False


class EnvWorker:
    """One process with the environments in it: a worker, or the trainer itself."""

    def __init__(self, child: WorkerProcess | None):
        self.child = child
        self.started = time.monotonic()
        self.environments: dict[int, EnvHandle] = {}
        self.queue: deque[EnvHandle] = deque()
        self.flights: dict[int, Flight] = {}

    @property
    def is_ready(self) -> bool:
        return self.child is None or self.child.is_ready

    def late(self, now: float, was_away: bool) -> set[int]:
        """Numbers of the environments whose deadlines have passed. If an answer may be waiting unread, because the
        workers were not polled, or is being received, its deadline is extended."""
        is_coming = self.child is not None and self.child.is_speaking
        if self.child is not None:
            self.child.is_speaking = False
        late = {number: flight for number, flight in self.flights.items() if flight.deadline <= now}
        for number, flight in list(late.items()):
            if is_coming or (was_away and not flight.is_spared):
                flight.deadline, flight.is_spared = now + GRACE_SECONDS, True
                del late[number]
        return set(late)

    @property
    def load(self) -> int:
        return len(self.environments) + len(self.queue)
