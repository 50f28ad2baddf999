"""The engine of ranks that have speakers: other ranks generate, with the native engine on weights they are sent.

Each slot's requests go to one speaker, which does nothing else meanwhile. So a sample, and the last bit of its
log-probabilities, is what the learner's own engine would have drawn.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from lemma.core import ranks
from lemma.core.ranks import SpeakerLink
from lemma.engines import sent_weights
from lemma.engines.protocol import Completion, Engine, EngineError, Key, Request, check_request
from lemma.engines.spoken_words import (
    Begin,
    End,
    Failed,
    Load,
    More,
    SpeakerReady,
    SpokenSample,
    StopAsked,
    Taken,
    TakeWeights,
    Unload,
)
from lemma.engines.vllm.vllm_probe import probe_prompt, verify
from lemma.models.policy import Policy

T = TypeVar("T")
# Between two looks at whether anything else is to be done.
LOOK_SECONDS = 0.05
SAMPLES, ENGINE, WEIGHTS = "samples of the speakers", "the speakers' engine", "weights for the speakers"


class _Session:
    """A part of the work at one speaker: what is unsent, what it still owes, and what it has said."""

    def __init__(self, number: int, peer: Connection, is_begun: bool = False):
        self.number, self.peer, self.is_begun = number, peer, is_begun
        self.foreseen: dict[Key, Request] = {}
        self.unsent: list[Request] = []
        self.cancelled: list[Key] = []
        self.owed = 0
        self.ready: deque[Completion] = deque()
        self.failure: bytes | None = None

    @property
    def is_idle(self) -> bool:
        return not (self.owed or self.ready or self.failure)


class SpokenEngine(Engine):
    """See `lemma.engines.protocol.Engine`. Every rank that learns has one; the first one loads and sends weights.

    `spent` hears of the seconds that speakers worked for this rank.
    """

    is_apart = True

    def __init__(self, policy: Policy, link: SpeakerLink, load: Load, spent: Callable[[float], None]):
        self.policy, self._link, self._spent = policy, link, spent
        self._lock = threading.Lock()
        self._sessions: dict[int, _Session] = {}
        self._foreseen: dict[int, _Session] = {}
        self._answers: deque[tuple[Connection, Any]] = deque()
        self._heard = time.monotonic()
        self._is_closed = False
        self.version = 0
        self.difference = 0.0  # between both sides, at the last probe
        loaded = ranks.from_leader(lambda: self._ask(load, SpeakerReady), ENGINE)
        first = loaded[0]
        self.name, self.context, self.in_place_of = first.name, first.context, first.in_place_of
        rooms = [one.room for one in loaded if one.room is not None]
        self._room = min(rooms, default=None)
        self._only = self._current = self._new_session(0)

    @property
    def room(self) -> int | None:
        return self._room

    # --- slots -------------------------------------------------------------------------------------------------

    def foresee(self, requests: Mapping[int, Sequence[Request]]) -> None:
        """Where there are several slots, their speakers begin at once; the learner reads what they say in its time."""
        if ranks.slots() == 1:
            return
        for session in self._foreseen.values():
            self._end(session)
        self._foreseen = {}
        for number, own in requests.items():
            for request in own:
                check_request(request, self.context)
            if own:
                session = self._new_session(number, is_begun=True)
                session.foreseen = {request.key: request for request in own}
                self._foreseen[number] = session
                self._send(session.peer, Begin(session.number, own, is_whole=True, forgets_prompts=True))

    @contextmanager
    def slot(self, number: int) -> Iterator[None]:
        foreseen = number in self._foreseen
        self._current = self._foreseen.pop(number) if foreseen else self._new_session(number)
        try:
            yield
        finally:
            self._end(self._current)
            self._current = self._only

    def _new_session(self, slot: int, is_begun: bool = False) -> _Session:
        """Slots are dealt to the speakers in turn."""
        self._link.sessions += 1
        session = _Session(self._link.sessions, self._link.connections[slot % len(self._link.connections)], is_begun)
        self._sessions[session.number] = session
        return session

    def _end(self, session: _Session) -> None:
        """A session that the speaker has ended by itself hears of it in vain."""
        self._sessions.pop(session.number, None)
        if session.is_begun and not self._is_closed:
            self._send(session.peer, End(session.number))

    # --- the protocol ------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        check_request(request, self.context)
        session = self._current
        if session.foreseen:
            assert request.key in session.foreseen, "what is submitted within a slot was foreseen"
        else:
            session.unsent.append(request)
        session.owed += request.n

    def cancel(self, key: Key) -> None:
        self._current.cancelled.append(key)

    def completions(self) -> Iterator[Completion]:
        session = self._current
        while not session.is_idle:
            self._flush(session)
            while session.ready:
                yield session.ready.popleft()
            if session.failure is not None:
                failure, session.failure, session.owed = session.failure, None, 0
                raise pickle.loads(failure)
            if session.owed and not session.unsent:
                self._receive(SAMPLES)
                if self.between is not None:
                    self.between()

    def update_weights(self, version: int) -> None:
        """Send the weights, and compare what every speaker draws with them with the policy."""
        self.version = version
        order = TakeWeights(version, probe_prompt(self.policy, self.context))
        if ranks.is_leader():
            for peer in self._link.connections:
                self._send(peer, order)
        with ranks.waiting_for_speakers(WEIGHTS):
            sent_weights.send(self.policy, self._link.carrier, self._link.on_device)
        taken = ranks.from_leader(lambda: self._all_say(Taken), WEIGHTS)
        self.difference = max(verify(self.policy, one.scores, version, "a speaker") for one in taken)

    def invalidate(self) -> None:
        self.update_weights(self.version)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            for peer in self._link.connections if ranks.is_leader() else ():
                self._send(peer, Unload())

    # --- talking -----------------------------------------------------------------------------------------------

    def _flush(self, session: _Session) -> None:
        requests, cancelled = session.unsent, session.cancelled
        if not (requests or cancelled):
            return
        session.unsent, session.cancelled = [], []
        if not session.is_begun:
            session.is_begun = True
            forgets = session is not self._only
            self._send(session.peer, Begin(session.number, requests, is_whole=False, forgets_prompts=forgets))
            requests = []
        if requests or cancelled:
            self._send(session.peer, More(session.number, requests, cancelled))

    def _ask(self, word: object, kind: type[T]) -> list[T]:
        for peer in self._link.connections:
            self._send(peer, word)
        return self._all_say(kind)

    def _all_say(self, kind: type[T]) -> list[T]:
        """The answer of every speaker, in their order; what one of them could not do is raised when all have said."""
        said: dict[Connection, Any] = {}
        while len(said) < len(self._link.connections):
            self._receive(ENGINE)
            while self._answers:
                peer, word = self._answers.popleft()
                if isinstance(word, kind | Failed):
                    said[peer] = word
        answers = [said[peer] for peer in self._link.connections]
        for word in answers:
            if isinstance(word, Failed):
                raise pickle.loads(word.error)
        return answers

    def _send(self, peer: Connection, word: object) -> None:
        """One thread at a time; the speaker reads whatever else it does."""
        with ranks.waiting_for_speakers(SAMPLES), self._lock:
            self._heard = time.monotonic()
            try:
                peer.send(word)
            except OSError as error:
                raise RuntimeError(self._lost(peer)) from error

    def _receive(self, place: str) -> None:
        """Take what speakers have said, after waiting a little for it."""
        if self._is_closed:
            raise EngineError("the speakers' engine is closed", fix="make another engine")
        with ranks.waiting_for_speakers(place):
            with self.meanwhile():
                ready = wait(self._link.connections, LOOK_SECONDS)
            for peer in ready:
                assert isinstance(peer, Connection)
                try:
                    word = peer.recv()
                except (EOFError, OSError) as error:
                    raise RuntimeError(self._lost(peer)) from error
                self._heard = time.monotonic()
                self._take(peer, word)
            if time.monotonic() - self._heard > self._link.deadline:
                raise RuntimeError(f"no speaker said anything for {self._link.deadline:.0f} s")

    def _lost(self, peer: Connection) -> str:
        return f"the connection to rank {self._link.ranks[self._link.connections.index(peer)]} is lost"

    def _take(self, peer: Connection, word: object) -> None:
        if isinstance(word, StopAsked):
            ranks.ask_to_stop()
        elif isinstance(word, SpokenSample):
            self._spent(word.seconds)
            session = self._sessions.get(word.session)
            if session is not None:
                session.owed -= 1
                session.ready.append(word.completion)
        elif isinstance(word, Failed) and word.session is not None:
            session = self._sessions.get(word.session)
            if session is not None:
                session.failure = word.error
        else:
            self._answers.append((peer, word))
