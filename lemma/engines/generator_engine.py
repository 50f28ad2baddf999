"""The engine of learner ranks that have speakers: generation-only ranks, with the native engine on broadcast weights.

Each slot's requests go to one speaker, which works on nothing else at that time. So a sample is bit-identical, with its
log-probabilities, to what the learner's own engine would have sampled. With `lag: flying` a request goes to the speaker
that owes this learner the fewest samples, and runs together with the requests of others.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from lemma.core import ranks
from lemma.core.ranks import SpeakerLink
from lemma.engines import weight_broadcast
from lemma.engines.protocol import Completion, Engine, EngineError, Key, Request, check_request
from lemma.engines.remote.weights_probe import probe_prompt, verify
from lemma.engines.speaker_messages import (
    Begin,
    End,
    Failed,
    Heartbeat,
    Load,
    More,
    SpeakerReady,
    SpokenSample,
    StopAsked,
    Taken,
    TakeWeights,
    Unload,
)
from lemma.models.policy import Policy

T = TypeVar("T")
# Seconds of one wait for messages.
LOOK_SECONDS = 0.05
# After so long without work a speaker's deadline begins anew: the learner had something else to do.
AWAY_SECONDS = 1.0
SAMPLES, ENGINE, WEIGHTS = "samples of the speakers", "the speakers' engine", "weights for the speakers"


class _Session:
    """One slot's requests at one speaker, or those in flight at several: what is not sent yet, which samples they still
    owe, and what they have returned."""

    def __init__(self, number: int, peers: Sequence[Connection], *, is_partial: bool = False):
        self.number, self.peers, self.is_partial = number, peers, is_partial
        self.begun: set[Connection] = set()
        self.announced: set[Key] = set()
        self.unsent: dict[Connection, list[Request]] = {}
        self.cancelled: dict[Connection, list[Key]] = {}
        # For each unfinished request: its speaker, and how many samples it still owes.
        self.owed: dict[Key, tuple[Connection, int]] = {}
        self.ready: deque[Completion] = deque()
        self.failure: bytes | None = None

    @property
    def is_idle(self) -> bool:
        return not (self.owed or self.ready or self.failure)

    @property
    def debtors(self) -> set[Connection]:
        return {peer for peer, _ in self.owed.values()}

    def add(self, request: Request) -> None:
        if self.announced:
            assert request.key in self.announced, "everything submitted in a slot has been announced"
            return
        peer = self._least_busy() if len(self.peers) > 1 else self.peers[0]
        self.unsent.setdefault(peer, []).append(request)
        self.owed[request.key] = peer, request.n

    def announce(self, requests: Sequence[Request]) -> None:
        """These are sent immediately, and may be finished before they are submitted."""
        self.announced = {request.key for request in requests}
        self.owed = {request.key: (self.peers[0], request.n) for request in requests}
        self.begun.update(self.peers)

    def _least_busy(self) -> Connection:
        load = dict.fromkeys(self.peers, 0)
        for peer, count in self.owed.values():
            load[peer] += count
        return min(load, key=load.__getitem__)

    def cancel(self, key: Key) -> None:
        if key in self.owed:
            self.cancelled.setdefault(self.owed[key][0], []).append(key)

    def take(self, completion: Completion) -> None:
        """Take a sample, unless its request has failed."""
        if completion.key not in self.owed:
            return
        peer, count = self.owed.pop(completion.key)
        if count > 1:
            self.owed[completion.key] = peer, count - 1
        self.ready.append(completion)

    def fail(self, peer: Connection, error: bytes) -> None:
        """This speaker failed and will send nothing more for this session."""
        self.owed = {key: owed for key, owed in self.owed.items() if owed[0] is not peer}
        self.failure = error


class GeneratorEngine(Engine):
    """See `lemma.engines.protocol.Engine`. Every learner rank has one; the first one loads and sends weights.

    `spent` is called with the seconds that speakers worked for this rank. With `is_partial`, requests submitted
    outside of slots continue across updates.
    """

    has_own_devices = True

    def __init__(
        self, policy: Policy, link: SpeakerLink, load: Load, spent: Callable[[float], None], *, is_partial: bool = False
    ):
        self.policy, self._link, self._spent = policy, link, spent
        self._sending, self._hearing = threading.Lock(), threading.Lock()
        self.device_wait = threading.Event()
        self._sessions: dict[int, _Session] = {}
        self._announced: dict[int, _Session] = {}
        self._answers: deque[tuple[Connection, Any]] = deque()
        self._heard = dict.fromkeys(link.connections, time.monotonic())
        self._is_closed = False
        self.version = 0
        self.difference = 0.0  # between speakers and policy, at the last probe
        loaded = ranks.from_leader(lambda: self._ask(load, SpeakerReady), ENGINE)
        first = loaded[0]
        self.name, self.context, self.in_place_of = first.name, first.context, first.in_place_of
        capacities = [one.capacity for one in loaded if one.capacity is not None]
        self._capacity = min(capacities, default=None)
        self.updates_in_flight = is_partial and all(one.updates_in_flight for one in loaded)
        shift = ranks.rank() % len(link.connections)
        aloft = [*link.connections[shift:], *link.connections[:shift]]  # learners start with different speakers
        self._only = self._new_session(aloft if is_partial else link.connections[:1], is_partial=is_partial)
        self._use(self._only)
        self._worked = 0.0
        self._look_before, link.look = link.look, self._look

    @property
    def capacity(self) -> int | None:
        return self._capacity

    # --- slots -------------------------------------------------------------------------------------------------

    def announce(self, requests: Mapping[int, Sequence[Request]]) -> None:
        """With several slots, their speakers start immediately; the learner reads the results later."""
        if ranks.slots() == 1:
            return
        for session in self._announced.values():
            self._end(session)
        self._announced = {}
        for number, own in requests.items():
            for request in own:
                check_request(request, self.context)
            if own:
                session = self._new_session(self._peers_of(number))
                session.announce(own)
                self._announced[number] = session
                self._send(session.peers[0], Begin(session.number, own, is_whole=True, resets_prefix_cache=True))

    @contextmanager
    def slot(self, number: int) -> Iterator[None]:
        announced = number in self._announced
        self._use(self._announced.pop(number) if announced else self._new_session(self._peers_of(number)))
        try:
            yield
        finally:
            self._end(self._current)
            self._use(self._only)

    def _use(self, session: _Session) -> None:
        self._current, self.finished = session, session.ready

    def _peers_of(self, slot: int) -> Sequence[Connection]:
        """Slots are assigned to the speakers round-robin."""
        return [self._link.connections[slot % len(self._link.connections)]]

    def _new_session(self, peers: Sequence[Connection], *, is_partial: bool = False) -> _Session:
        self._link.sessions += 1
        session = _Session(self._link.sessions, peers, is_partial=is_partial)
        self._sessions[session.number] = session
        return session

    def _end(self, session: _Session) -> None:
        """End a session; the speaker ignores this if the session is already over."""
        self._sessions.pop(session.number, None)
        for peer in session.begun if not self._is_closed else ():
            self._send(peer, End(session.number))

    # --- the protocol ------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Requests of partial rollouts are sent at once, so that speakers have work whatever the learner does next."""
        check_request(request, self.context)
        self._current.add(request)
        if self._current.is_partial:
            self._flush(self._current)

    def cancel(self, key: Key) -> None:
        self._current.cancel(key)

    @property
    def is_busy(self) -> bool:
        return bool(self._current.owed or self._current.failure)

    def work(self) -> None:
        session = self._current
        self._check_open()
        if time.monotonic() - self._worked > AWAY_SECONDS:
            self._expect(session.debtors)
        self._flush(session)
        if session.failure is not None:
            failure, session.failure = session.failure, None
            raise pickle.loads(failure)
        if session.owed:
            self._receive(SAMPLES, session.debtors)
        self._worked = time.monotonic()

    def drop(self, keys: Sequence[Key]) -> None:
        """Speakers are told and need not reply: they may be busy with other requests."""
        before = self._current
        self._end(before)
        self._use(self._new_session(before.peers, is_partial=before.is_partial))
        if before is self._only:
            self._only = self._current

    def update_weights(self, version: int) -> None:
        """Send the weights, and compare every speaker's log-probabilities with the policy's."""
        self.version = version
        order = TakeWeights(version, probe_prompt(self.policy, self.context))
        if ranks.is_leader():
            for peer in self._link.connections:
                self._send(peer, order)
        with ranks.waiting_for_speakers(WEIGHTS):
            weight_broadcast.send(self.policy, self._link.carrier, self._link.on_device)
        taken = ranks.from_leader(lambda: self._all_say(Taken), WEIGHTS)
        self.difference = max(verify(self.policy, one.scores, version, "a speaker") for one in taken)

    def invalidate(self) -> None:
        self.update_weights(self.version)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._link.look = self._look_before
            for peer in self._link.connections if ranks.is_leader() else ():
                self._send(peer, Unload())

    # --- talking -----------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineError("the speakers' engine is closed", fix="make another engine")

    def _flush(self, session: _Session) -> None:
        unsent, session.unsent = session.unsent, {}
        cancelled, session.cancelled = session.cancelled, {}
        for peer in (peer for peer in session.peers if peer in unsent or peer in cancelled):
            requests, keys = unsent.get(peer, []), cancelled.get(peer, [])
            if peer not in session.begun:
                session.begun.add(peer)
                forgets = session is not self._only
                self._send(peer, Begin(session.number, requests, False, forgets, session.is_partial))
                requests = []
            if requests or keys:
                self._send(peer, More(session.number, requests, keys))

    def _ask(self, word: object, kind: type[T]) -> list[T]:
        for peer in self._link.connections:
            self._send(peer, word)
        return self._all_say(kind)

    def _all_say(self, kind: type[T]) -> list[T]:
        """The reply of every speaker, in their order; the first failure is raised after all have replied."""
        said: dict[Connection, Any] = {}
        self._expect(self._link.connections)
        while missing := [peer for peer in self._link.connections if peer not in said]:
            self._check_open()
            self._receive(ENGINE, missing)
            while self._answers:
                peer, word = self._answers.popleft()
                if isinstance(word, kind | Failed):
                    said[peer] = word
        answers = [said[peer] for peer in self._link.connections]
        for word in answers:
            if isinstance(word, Failed):
                raise pickle.loads(word.error)
        return answers

    def _expect(self, peers: Iterable[Connection]) -> None:
        """The deadline for hearing from these starts now."""
        self._heard |= dict.fromkeys(peers, time.monotonic())

    def _send(self, peer: Connection, word: object) -> None:
        """One thread at a time; a speaker always reads, even while it generates."""
        with ranks.waiting_for_speakers(SAMPLES), self._sending:
            self._expect([peer])
            try:
                peer.send(word)
            except OSError as error:
                raise RuntimeError(self._lost(peer)) from error

    def _receive(self, place: str, debtors: Iterable[Connection]) -> None:
        """Wait briefly for messages of speakers, and process them."""
        with ranks.waiting_for_speakers(place), self._hearing:
            assert self.device_wait is not None
            self.device_wait.set()
            ready = wait(self._link.connections, LOOK_SECONDS)
            self.device_wait.clear()
            self._hear(ready)
            now, deadline = time.monotonic(), self._link.deadline
            for peer in debtors:
                if now - self._heard[peer] > deadline:
                    raise RuntimeError(f"{self._name(peer)} said nothing for {deadline:.0f} s")

    def _look(self) -> None:
        """Process messages that have arrived, unless another thread does."""
        if self._hearing.acquire(blocking=False):
            try:
                with ranks.waiting_for_speakers(SAMPLES):
                    self._hear(wait(self._link.connections, 0.0))
            finally:
                self._hearing.release()

    def _hear(self, ready: Sequence[Any]) -> None:
        for peer in ready:
            try:
                word = peer.recv()
            except (EOFError, OSError) as error:
                raise RuntimeError(self._lost(peer)) from error
            self._heard[peer] = time.monotonic()
            self._take(peer, word)

    def _lost(self, peer: Connection) -> str:
        return f"the connection to {self._name(peer)} is lost"

    def _name(self, peer: Connection) -> str:
        return f"rank {self._link.ranks[self._link.connections.index(peer)]}"

    def _take(self, peer: Connection, word: object) -> None:
        if isinstance(word, StopAsked):
            ranks.ask_to_stop()
        elif isinstance(word, SpokenSample):
            self._spent(word.seconds)
            session = self._sessions.get(word.session)
            if session is not None:
                session.take(word.completion)
        elif isinstance(word, Failed) and word.session is not None:
            session = self._sessions.get(word.session)
            if session is not None:
                session.fail(peer, word.error)
        elif not isinstance(word, Heartbeat):
            self._answers.append((peer, word))
