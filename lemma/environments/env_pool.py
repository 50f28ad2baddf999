"""The environments of all episodes, in worker processes or here, and what happens when one breaks.

A call that kills its worker or runs past its deadline costs the worker, not the episodes: each is replayed in a fresh
environment, from the policy's turns, when it is needed next. The call itself gets one more try, alone in its worker. If
it breaks the environment again, the action counts as wrong; if a replay gives other replies, the outcome is unknown.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import selectors
import time
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lemma.core.errors import LemmaWarning, UserError, warn
from lemma.core.types import Problem
from lemma.environments.env_handle import GRACE_SECONDS, EnvFailure, EnvHandle, EnvWorker, Flight
from lemma.environments.env_server import CLOSE_SECONDS, Call, EnvAnswer, EnvOrder, EnvServer, Opening
from lemma.environments.environment import EnvironmentOptions, Observation
from lemma.environments.worker_process import WorkerLost, WorkerProcess

START_SECONDS = 120.0
# If the workers were not polled for this long, answers may be waiting unread.
AWAY_SECONDS = 0.5
# Time limit for closing all environments at the end.
LAST_SECONDS = 3.0
# Failed starts in a row after which the run stops.
STARTS = 3
TRIES = 2


class EnvPool:
    """`open` gives a handle whose calls are awaited; somebody has to `poll` meanwhile, as `polled` does."""

    def __init__(self, options: EnvironmentOptions):
        self._options, self._key, self._owner = options, options.world_key, os.getpid()
        self._deadlines = options.deadlines
        self._at_once = options.calls_at_once if options.workers else 1
        self._count = 0
        self._workers: list[EnvWorker] = []
        self._server = EnvServer(options)
        self._failed_starts = 0
        self._looked = time.monotonic()
        self._grace = GRACE_SECONDS if options.keeps_time else 0.0
        self._selector = selectors.DefaultSelector()
        self.lost = self.replayed = 0
        """Lost workers and replayed environments since the start."""
        _all.add(self)

    # --- calls ---------------------------------------------------------------------------------------------------

    def open(self, problem: Problem, seed: int) -> EnvHandle:
        self._count += 1
        return EnvHandle(self, self._count, problem, seed)

    def call(self, handle: EnvHandle, call: Call) -> asyncio.Future[Any]:
        handle.result = asyncio.get_running_loop().create_future()
        self._ask(handle, call)
        return handle.result

    def leave(self, handle: EnvHandle) -> None:
        if handle.is_left:
            return
        handle.is_left = True
        if handle.result is not None and not handle.result.done():
            handle.result.cancel()
        if handle.call is None and handle.worker is not None:
            self._ask(handle, "close")

    def poll(self) -> None:
        """Send what can be sent, and take the answers that are there; waits for nothing."""
        for worker in list(self._workers):
            self._send(worker)
        if any(worker.queue or worker.flights for worker in self._workers):
            while self._listen(0.0):
                pass

    def notify(self, loop: asyncio.AbstractEventLoop, arrived: Callable[[], object] | None) -> None:
        """Have `arrived` called on this loop whenever a worker has written something; None: no more. A selector has a
        file descriptor of its own."""
        if arrived is not None:
            loop.add_reader(self._selector, arrived)
        else:
            loop.remove_reader(self._selector)

    # --- sending -------------------------------------------------------------------------------------------------

    def _ask(self, handle: EnvHandle, call: Call) -> None:
        assert handle.call is None, "one call at a time"
        handle.call, handle.breaks, handle.lost_replays = call, 0, 0
        self._enqueue(handle)

    def _enqueue(self, handle: EnvHandle) -> None:
        worker = handle.worker if handle.worker is not None else self._choose()
        worker.queue.append(handle)
        self._send(worker)

    def _choose(self) -> EnvWorker:
        """The least loaded worker, or a new one."""
        wanted = self._options.workers
        best = min(self._workers, key=lambda worker: worker.load, default=None)
        if best is None or (best.load and len(self._workers) < wanted):
            best = self._new_worker()
        return best

    def _new_worker(self) -> EnvWorker:
        child = WorkerProcess(self._options) if self._options.workers else None
        worker = EnvWorker(child)
        self._workers.append(worker)
        if child is not None:
            self._selector.register(child.hearing, selectors.EVENT_READ, worker)
            self._write(worker)
        return worker

    def _send(self, worker: EnvWorker) -> None:
        """Send only what the worker can start immediately, so that deadlines count from now."""
        while worker.queue and worker.is_ready and len(worker.flights) < self._at_once:
            handle = worker.queue[0]
            alone = handle.is_alone or any(flight.handle.is_alone for flight in worker.flights.values())
            if alone and worker.flights:
                return
            worker.queue.popleft()
            self._dispatch(worker, handle)

    def _dispatch(self, worker: EnvWorker, handle: EnvHandle) -> None:
        call, now = handle.call, time.monotonic()
        assert call is not None
        opening = None
        seconds = CLOSE_SECONDS if call == "close" else getattr(self._deadlines, call)
        if handle.worker is not worker:
            opening = Opening(handle.problem, handle.seed, tuple(handle.actions))
            if call != "reset":
                seconds = self._deadlines.reset + self._deadlines.step * len(handle.actions)
                self.replayed += 1
            handle.worker = worker
            worker.environments[handle.number] = handle
        seconds += self._grace
        replays = opening is not None and call != "reset"
        worker.flights[handle.number] = Flight(handle, now, now + seconds, replays)
        order = EnvOrder(handle.number, call, handle.action if call == "step" else None, opening)
        if worker.child is None:
            self._server.perform(order, lambda answer: self._hear(worker, answer))
        else:
            try:
                worker.child.send(order)
            except WorkerLost as lost:
                self._lose(worker, str(lost))
                return
            self._watch_writing(worker)

    def _write(self, worker: EnvWorker) -> None:
        assert worker.child is not None
        try:
            worker.child.write()
        except WorkerLost as lost:
            self._lose(worker, str(lost))
            return
        self._watch_writing(worker)

    def _watch_writing(self, worker: EnvWorker) -> None:
        assert worker.child is not None
        is_watched = worker.child.sending in self._selector.get_map()
        if worker.child.out and not is_watched:
            self._selector.register(worker.child.sending, selectors.EVENT_WRITE, worker)
        elif not worker.child.out and is_watched:
            self._selector.unregister(worker.child.sending)

    # --- receiving -----------------------------------------------------------------------------------------------

    def _listen(self, wait: float) -> bool:
        """Process what has arrived, waiting at most `wait` seconds; whether anything happened."""
        now = time.monotonic()
        was_away = now - self._looked > AWAY_SECONDS
        limits = [flight.deadline for worker in self._workers for flight in worker.flights.values()]
        limits += [worker.started + START_SECONDS for worker in self._workers if not worker.is_ready]
        wait = min([wait, *(max(0.0, limit - now) for limit in limits)])
        events = self._selector.select(wait)
        for key, mask in events:
            worker: EnvWorker = key.data
            if worker in self._workers:
                if mask & selectors.EVENT_WRITE:
                    self._write(worker)
                elif mask & selectors.EVENT_READ:
                    self._read(worker)
        self._looked = time.monotonic()
        return self._end_overdue(was_away) or bool(events)

    def _read(self, worker: EnvWorker) -> None:
        assert worker.child is not None
        try:
            for answer in worker.child.read():
                self._hear(worker, answer)
                if worker not in self._workers:  # it was found dead on the way
                    return
        except WorkerLost as lost:
            self._lose(worker, str(lost))
        else:
            if worker.is_ready:
                self._failed_starts = 0

    def _hear(self, worker: EnvWorker, answer: EnvAnswer) -> None:
        flight = worker.flights.get(answer.env)
        if flight is None:
            return
        handle = flight.handle
        if answer.kind == "replayed":
            self._compare(worker, flight, answer.value)
            return
        del worker.flights[handle.number]
        handle.seconds += answer.seconds
        call, handle.call = handle.call, None
        if answer.kind == "given":
            if call == "step":
                assert handle.action is not None
                handle.actions.append(handle.action)
                handle.observations.append(answer.value)
            if call == "close":
                self._forget(worker, handle)
            handle.is_alone = False
            self._finish(handle, call, answer.value)
            return
        self._forget(worker, handle)
        if answer.kind in ("wrong", "refused"):
            raise UserError(answer.value, fix=_FIX if answer.kind == "wrong" else None)
        if answer.kind == "gone":
            handle.call = call
            self._broke(handle, answer.value, in_replay=flight.replays)
        else:
            self._finish(handle, call, EnvFailure(f"the environment failed: {answer.value}"))

    def _compare(self, worker: EnvWorker, flight: Flight, observations: tuple[Observation, ...]) -> None:
        """Check the replies of a replayed environment; the call itself follows, with its own deadline."""
        handle = flight.handle
        call = handle.call
        if list(observations) == handle.observations and call is not None:
            flight.replays = False
            seconds = CLOSE_SECONDS if call == "close" else getattr(self._deadlines, call)
            flight.began = time.monotonic()
            flight.deadline = flight.began + seconds + self._grace
            return
        # The answer to the call itself comes from a diverged environment: wait for it and drop it.
        stray = replace(handle, is_left=True)
        flight.handle = worker.environments[handle.number] = stray
        flight.replays, flight.deadline = False, time.monotonic() + max(self._deadlines.step, self._deadlines.score)
        self._count += 1
        handle.number, handle.worker, handle.call = self._count, None, None
        self._finish(handle, call, EnvFailure("the environment answered differently when it was played again"))

    def _finish(self, handle: EnvHandle, call: Call | None, value: Any) -> None:
        if handle.is_left and call != "close":
            if handle.worker is not None:
                self._ask(handle, "close")
        elif handle.result is not None and not handle.result.done():
            if isinstance(value, EnvFailure):
                handle.result.set_exception(value)
            else:
                handle.result.set_result(value)

    # --- failures ------------------------------------------------------------------------------------------------

    def _end_overdue(self, was_away: bool) -> bool:
        """Kill every worker with a call past its deadline, or that does not start."""
        now, was_any = time.monotonic(), False
        for worker in list(self._workers):
            late = worker.late(now, was_away)
            if late or (not worker.is_ready and worker.started + START_SECONDS <= now):
                self._lose(worker, "it does not answer", late)
                was_any = True
        return was_any

    def _lose(self, worker: EnvWorker, why: str, late: set[int] | None = None) -> None:
        """Drop a worker. If it died, any of its running calls may be the cause, so each is retried alone."""
        assert worker.child is not None
        self._workers.remove(worker)
        for channel in (worker.child.hearing, worker.child.sending):
            if channel in self._selector.get_map():
                self._selector.unregister(channel)
        worker.child.end()
        flights, queue = list(worker.flights.values()), list(worker.queue)
        worker.queue.clear()
        for handle in worker.environments.values():
            handle.worker = None
        self.lost += 1
        if not worker.is_ready:
            self._failed_starts += 1
            if self._failed_starts >= STARTS:
                name = self._options.name
                raise UserError(f"workers of environment {name} do not start ({why})", fix="`workers: 0` shows more")
        elif any(flight.handle.call != "close" for flight in flights) or len(worker.environments) > len(flights):
            text = f"a worker of environment {self._options.name} was lost ({why}) and is replaced"
            warn(f"{text}; {len(worker.environments)} episodes are played again")
        for flight in flights:
            handle = flight.handle
            handle.seconds += time.monotonic() - flight.began
            if handle.call == "close":
                handle.call = None
                self._finish(handle, "close", None)
            elif late is None or handle.number in late:
                handle.is_alone = True
                self._broke(handle, why, in_replay=flight.replays)
            else:
                self._enqueue(handle)
        for handle in queue:
            if handle.call == "close":
                handle.call = None
                self._finish(handle, "close", None)
            else:
                self._enqueue(handle)

    def _broke(self, handle: EnvHandle, why: str, in_replay: bool) -> None:
        """A call broke its environment: one more try in a fresh one, or a failure if it was the last try."""
        call = handle.call
        if handle.is_left:
            handle.call = None
            return
        handle.lost_replays += in_replay
        handle.breaks += not in_replay
        if max(handle.breaks, handle.lost_replays) < TRIES:
            self._enqueue(handle)
            return
        handle.call = None
        if in_replay:
            self._finish(handle, call, EnvFailure(f"the environment broke when it was played again: {why}"))
        elif call == "step":
            self._finish(handle, call, EnvFailure(f"limit: the same action broke the environment twice ({why})", True))
        else:
            self._finish(handle, call, EnvFailure(f"`{call}` broke the environment twice: {why}"))

    def _forget(self, worker: EnvWorker, handle: EnvHandle) -> None:
        """The environment no longer exists."""
        worker.environments.pop(handle.number, None)
        handle.worker = None

    # --- ending --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close every environment within a time limit, and end every worker."""
        if os.getpid() != self._owner:
            return
        _shared.pop(self._key, None)
        for worker in self._workers:
            for handle in [*worker.environments.values(), *worker.queue]:
                if handle.call is not None and handle in worker.queue:
                    worker.queue.remove(handle)
                    handle.call = None
                self.leave(handle)
        until = time.monotonic() + LAST_SECONDS
        while any(worker.queue or worker.flights for worker in self._workers) and time.monotonic() < until:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", LemmaWarning)
                self._listen(until - time.monotonic())
                for worker in list(self._workers):
                    self._send(worker)
        for worker in self._workers:
            if worker.child is not None:
                worker.child.end()
        self._workers = []
        self._server.close()

    def _after_fork(self) -> None:
        for worker in self._workers:
            if worker.child is not None:
                worker.child.forget()
        self._workers = []

    @classmethod
    def of(cls, options: EnvironmentOptions) -> EnvPool:
        """The instance for these options in this process, shared so that workers are not started twice."""
        key = options.world_key
        if key not in _shared:
            _shared[key] = cls(options)
        return _shared[key]


_FIX = "return a `lemma.environments.Observation` from `step` and an `Outcome` from `score`"
_all: weakref.WeakSet[EnvPool] = weakref.WeakSet()
_shared: dict[str, EnvPool] = {}


def _close_all() -> None:
    for pool in list(_all):
        pool.close()


def _after_fork_in_child() -> None:
    for pool in list(_all):
        pool._after_fork()
    _shared.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_after_fork_in_child)
