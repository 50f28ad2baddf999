"""The native engine on generation servers.

Each slot's requests go to one server, which works on nothing else at that time. So a sample is bit-identical, with its
log-probabilities, to what the learner's own engine would have sampled. If that server dies, another one begins the slot
again from its first request, and what had come already is not taken twice. Responses that fly (`lag: flying`) are
balanced over the servers one request at a time, and run together.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lemma.core import ranks
from lemma.engines.engine_options import NativeOptions
from lemma.engines.protocol import Completion, Engine, EngineError, Key, Request
from lemma.engines.remote.native_servers import NativeServers
from lemma.engines.remote.rollout_wire import END, GENERATE, completion_of, request_as_json
from lemma.engines.remote.served_jobs import ServedJobs
from lemma.engines.remote.server_client import ServerReply
from lemma.engines.remote.server_pool import Member
from lemma.engines.remote.weights_folder import WeightsFolder
from lemma.engines.sampling import check_request
from lemma.models.policy import Policy

WEIGHTS, PLACE = "weights for the generation servers", "the generation servers"


@dataclass(eq=False)
class RolloutSession:
    """Requests whose results are waited for together. Where it is `alone`, one server works on it and on nothing else,
    batch by batch: `history` has all batches since it began. `preferred` says which server that is, if it is up."""

    name: str
    alone: bool
    preferred: int = 0
    is_whole: bool = False
    member: Member | None = None
    unsent: list[Request] = field(default_factory=list)
    history: list[list[Request]] = field(default_factory=list)
    owed: dict[Key, set[int]] = field(default_factory=dict)
    """The samples of each request that have not come."""
    ready: deque[Completion] = field(default_factory=deque)
    failure: EngineError | None = None

    def add(self, request: Request) -> None:
        if request.key in self.owed:
            raise EngineError(f"request {request.name} is already running", fix="give it another key")
        self.unsent.append(request)
        self.owed[request.key] = set(range(request.n))

    def take(self, completion: Completion) -> bool:
        """Whether this sample had not come before."""
        left = self.owed.get(completion.key)
        if left is None or completion.sample not in left:
            return False
        left.remove(completion.sample)
        if not left:
            del self.owed[completion.key]
        self.ready.append(completion)
        return True

    def fail(self, error: EngineError) -> None:
        self.owed, self.unsent, self.failure = {}, [], error


@dataclass(eq=False)
class RolloutJob:
    """One exchange with a server: a batch of a session, or batches of one that begins again from `start`."""

    name: str
    session: RolloutSession
    start: int
    batches: list[list[Request]]

    @property
    def tokens(self) -> int:
        """The most tokens that it may take."""
        return sum((len(one.prompt) + one.sampling.max_tokens) * one.n for batch in self.batches for one in batch)


class RemoteEngine(ServedJobs, Engine):
    """See `lemma.engines.protocol.Engine`. Every rank has one, on the same servers; the first rank publishes weights.

    `spent` is called with the seconds that servers worked for this rank. With `is_partial`, requests that are submitted
    outside of slots continue across updates.
    """

    has_own_devices = True
    updates_in_flight = True
    servers: NativeServers

    def __init__(
        self,
        policy: Policy,
        seed: int,
        options: NativeOptions,
        cache: int | None = None,
        *,
        is_partial: bool = False,
        spent: Callable[[float], None] = lambda seconds: None,
    ):
        self.policy, self.options, self._is_partial, self._spent = policy, options, is_partial, spent
        self.device_wait = self._is_waiting = threading.Event()
        self.version = 0
        self.difference = 0.0  # between servers and policy, at the last probe
        self._jobs: dict[str, RolloutJob] = {}
        self._waiting: dict[str, RolloutJob] = {}
        self._announced: dict[int, RolloutSession] = {}
        self._prefix, self._count = secrets.token_hex(4), 0
        self._heard = time.monotonic()
        self._folder = WeightsFolder()
        self.servers = NativeServers(policy, options, cache, seed, self._folder.path, self._ask_again)
        self._use(self._new_session())
        try:
            self.servers.write_weights()
            self.servers.start()
            facts = ranks.from_leader(lambda: self.servers.facts, PLACE)
            self.difference = self.servers.check(0)
        except BaseException:
            self.close()
            raise
        self.name, self.context, self.in_place_of = facts["name"], facts["context"], facts["in_place_of"]
        self._capacity: int | None = facts["capacity"]

    @property
    def capacity(self) -> int | None:
        return self._capacity

    # --- slots -----------------------------------------------------------------------------------------------------

    def announce(self, requests: Mapping[int, Sequence[Request]]) -> None:
        """With several slots, their servers start immediately; the learner reads the results later."""
        if ranks.slots() == 1:
            return
        for session in self._announced.values():
            self._end(session)
        self._announced = {}
        for number, own in requests.items():
            if own:
                self._announced[number] = session = self._new_session(number)
                session.is_whole = True
                for request in own:
                    check_request(request, self.context)
                    session.add(request)
                self._flush(session)

    @contextmanager
    def slot(self, number: int) -> Iterator[None]:
        before = self._current
        self._use(self._announced.pop(number) if number in self._announced else self._new_session(number))
        try:
            yield
        finally:
            self._end(self._current)
            self._use(before)

    def _use(self, session: RolloutSession) -> None:
        self._current, self.finished = session, session.ready

    def _new_session(self, slot: int | None = None) -> RolloutSession:
        self._count += 1
        alone = slot is not None or not self._is_partial
        return RolloutSession(f"{self._prefix}-s{self._count}", alone, ranks.rank() if slot is None else slot)

    def _end(self, session: RolloutSession) -> None:
        """Nothing more of this session is wanted."""
        for job in [job for job in self._jobs.values() if job.session is session]:
            self._abort(job)
        member = session.member
        if session.alone and session.history and not session.is_whole and member is not None and member.client:
            self._count += 1
            member.client.ask(f"{self._prefix}-e{self._count}", END, {"session": session.name})

    # --- the protocol ----------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Requests of partial rollouts are sent at once, so that servers have work whatever the learner does next."""
        session = self._current
        if session.is_whole:
            return
        check_request(request, self.context)
        session.add(request)
        if not session.alone:
            self._flush(session)

    def cancel(self, key: Key) -> None:
        """Its samples that have not come are empty."""
        session = self._current
        if (left := session.owed.pop(key, None)) is None:
            return
        session.unsent = [one for one in session.unsent if one.key != key]
        none = np.zeros(0, np.float32)
        for sample in sorted(left):
            ids = np.zeros(0, np.int64)
            session.ready.append(Completion(key, sample, ids, none, none, "cancelled", self.version))
        for job in [job for job in self._jobs.values() if job.session is session and not session.alone]:
            if job.batches[0][0].key == key:
                self._abort(job)

    @property
    def is_busy(self) -> bool:
        return bool(self._current.owed or self._current.failure)

    def work(self) -> None:
        session = self._current
        self._flush(session)
        if session.failure is not None:
            failure, session.failure = session.failure, None
            raise failure
        if session.owed:
            self._advance()

    def drop(self, keys: Sequence[Key]) -> None:
        """Servers are told and need not answer: they may be busy with other requests."""
        self._end(self._current)
        self._use(self._new_session())

    def update_weights(self, version: int) -> None:
        """Publish the weights, and compare every server's log-probabilities with the policy's."""
        self.version = self.servers.version = version
        self.servers.write_weights()
        ranks.from_leader(self.servers.publish, WEIGHTS)
        self.difference = self.servers.check(version)
        if self._current.alone:  # servers have dropped their caches, as an engine does here
            self._end(self._current)
            self._use(self._new_session())

    def invalidate(self) -> None:
        self.update_weights(self.version)

    def close(self) -> None:
        for job in list(self._jobs.values()):
            self._abort(job)
        self.servers.close()
        self._folder.remove()

    # --- asking and taking -----------------------------------------------------------------------------------------

    def _flush(self, session: RolloutSession) -> None:
        if not session.unsent:
            return
        if not self._jobs:
            self._heard = time.monotonic()
        batch, session.unsent = session.unsent, []
        if session.alone:
            session.history.append(batch)
            self._ask(RolloutJob(self._name(), session, len(session.history) - 1, [batch]))
        else:
            for request in batch:
                self._ask(RolloutJob(self._name(), session, 0, [[request]]))

    def _name(self) -> str:
        self._count += 1
        return f"{self._prefix}-{self._count}"

    def _ask(self, job: RolloutJob) -> None:
        session, up = job.session, self.pool.up
        self._jobs[job.name] = job
        if not up:
            self._waiting[job.name] = job
            return
        if session.alone and session.member not in up:
            is_new = session.member is None and len(session.history) == 1
            session.member = up[session.preferred % len(up)]
            if not is_new:
                self._begin_again(job)
        client = self.pool.give(job.name, job.tokens, session.member if session.alone else None)
        assert client is not None
        body = {
            "id": self.servers.load_id,
            "version": self.version,
            "session": session.name if session.alone else None,
            "start": job.start,
            "is_whole": session.is_whole,
            "batches": [[request_as_json(request) for request in batch] for batch in job.batches],
        }
        client.ask(job.name, GENERATE, body)

    def _begin_again(self, job: RolloutJob) -> None:
        """All batches of the job's session are one job now, from the first one on."""
        for other in [one for one in self._jobs.values() if one.session is job.session and one is not job]:
            self._abort(other)
        job.start, job.batches = 0, list(job.session.history)

    def _abort(self, job: RolloutJob) -> None:
        self._jobs.pop(job.name, None)
        super()._abort(job)

    def _advance(self) -> None:
        """Take the replies that have come; then look after the servers."""
        self._is_waiting.set()
        for job, member, reply in self._replies():
            self._is_waiting.clear()
            self._take(job, member, reply)
        self._is_waiting.clear()
        self._look_after()
        if time.monotonic() - self._heard > self.options.answer_seconds:
            self._current.fail(EngineError(f"no sample came for {self.options.answer_seconds:g} seconds"))

    def _take(self, job: RolloutJob, member: Member, reply: ServerReply) -> None:
        assert member.client is not None
        if reply.status == 200 and reply.body is not None:
            self._take_line(job, member, reply.body)
        elif reply.status == 200:
            self._abort(job)
            member.deaths = 0
        elif reply.status == 0:
            self._lost_connection(job, member)
        else:
            self._abort(job)
            job.session.fail(EngineError(f"{member.client.place} refused a request: {reply.error}"))

    def _take_line(self, job: RolloutJob, member: Member, line: dict[str, Any]) -> None:
        session = job.session
        if "ids" in line:
            self._spent(line["worked"])
            if session.take(completion_of(line)):
                self._heard = time.monotonic()
        elif "error" in line:
            self._abort(job)
            session.fail(EngineError(line["error"]))
        elif line.get("is_stale"):  # it has other weights, or none: it was started again
            self.servers.lose(member)
        else:  # it does not know what this session did before
            self.pool.release(job.name)
            self._begin_again(job)
            self._ask(job)

    def _lost_connection(self, job: RolloutJob, member: Member) -> None:
        assert member.client is not None
        if not member.client.is_well():
            self.servers.lose(member)
            return
        self.pool.release(job.name)
        if job.session.alone:
            self._begin_again(job)
        self._ask(job)
