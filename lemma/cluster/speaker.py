"""A rank that only generates: it holds the model's weights and an engine, and no optimiser.

It does what learners ask for, one session at a time and in the order in which they began. Whatever depends on time here
decides when a sample is finished, and never what it is.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from types import FrameType

import numpy as np
import torch

from lemma.core.errors import UserError
from lemma.core.events import Said, Sink
from lemma.core.faults import fault_point
from lemma.core.ranks import IDLE, RankWorld, note_place, portable
from lemma.engines import make_engine, sent_weights
from lemma.engines.protocol import Engine, EngineError, Key, Request, Sampling, generate
from lemma.engines.spoken_words import (
    Begin,
    Bye,
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
from lemma.engines.vllm.vllm_probe import NEW_TOKENS, ProbeScores
from lemma.models.load_model import build_policy
from lemma.models.policy import Policy

# How long a speaker without work waits before it looks whether it was asked to stop.
IDLE_SECONDS = 0.5
# Share of the memory that is free on a GPU once the weights are there.
CACHE_SHARE = 0.85


@dataclass
class _Session:
    """Numbers are the learner's own: two of them may have the same."""

    peer: Connection
    number: int
    is_whole: bool
    forgets_prompts: bool
    requests: list[Request]
    cancelled: list[Key] = field(default_factory=list)
    keys: set[Key] = field(default_factory=set)
    is_ended: bool = False

    @property
    def has_news(self) -> bool:
        return bool(self.requests or self.cancelled)


class _Outbox:
    """Words for one learner, sent by a thread: a speaker reads on while a learner is slow to, so that the two never
    wait for each other."""

    def __init__(self, peer: Connection):
        self._peer = peer
        self._words: SimpleQueue[object] = SimpleQueue()
        self._failure: OSError | None = None
        self._thread = threading.Thread(target=self._work, name="speaking", daemon=True)
        self._thread.start()

    def put(self, word: object) -> None:
        if self._failure is not None:
            raise self._failure
        self._words.put(word)

    def close(self) -> None:
        """Everything is sent, or the learner is gone."""
        self._words.put(None)
        self._thread.join()

    def _work(self) -> None:
        try:
            while (word := self._words.get()) is not None:
                self._peer.send(word)
        except OSError as error:
            self._failure = error


def speak(world: RankWorld, sink: Sink) -> None:
    """Serve the ranks that learn until all of them are done."""
    speaker = Speaker(world, sink)
    with speaker.listening():
        speaker.run()


class Speaker:
    def __init__(self, world: RankWorld, sink: Sink):
        assert world.link is not None
        self._world, self._link, self._sink = world, world.link, sink
        self._peers = list(self._link.connections)
        self._outboxes = {peer: _Outbox(peer) for peer in self._peers}
        self._sessions: deque[_Session] = deque()
        # What is done between two sessions' works, never while something is being generated.
        self._orders: deque[tuple[Connection, Load | TakeWeights | Unload]] = deque()
        self._policy: Policy | None = None
        self._engine: Engine | None = None
        self._layout: sent_weights.Layout = ()
        self._stops, self._is_stop_told = 0, False

    def run(self) -> None:
        while self._peers:
            self._hear(0.0 if self._is_busy else IDLE_SECONDS)
            while self._orders:
                self._obey(*self._orders.popleft())
            self._work()

    @property
    def _is_busy(self) -> bool:
        first = self._sessions[0] if self._sessions else None
        return bool(self._orders) or (first is not None and (first.has_news or first.is_whole or first.is_ended))

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Within `with`, SIGTERM and Ctrl-C are told to the learners; a second Ctrl-C ends this rank at once."""

        def ask(number: int, frame: FrameType | None) -> None:
            self._stops += 1
            if self._stops > 1 and number == signal.SIGINT:
                raise KeyboardInterrupt

        before = {}
        with suppress(ValueError):  # only the main thread hears signals
            before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    # --- hearing and saying ------------------------------------------------------------------------------------

    def _hear(self, seconds: float) -> None:
        """Take the words that are there, after at most so many seconds."""
        if self._stops and not self._is_stop_told:
            self._is_stop_told = True
            for peer in self._peers:
                with suppress(OSError):  # it may be done
                    self._outboxes[peer].put(StopAsked())
        with self._world.waiting(IDLE):
            for peer in wait(self._peers, seconds):
                assert isinstance(peer, Connection)
                try:
                    word = peer.recv()
                except (EOFError, OSError) as error:
                    raise RuntimeError(self._lost(peer)) from error
                self._take(peer, word)

    def _say(self, peer: Connection, word: object) -> None:
        with self._world.waiting("a learner that reads"):
            try:
                self._outboxes[peer].put(word)
            except OSError as error:
                raise RuntimeError(self._lost(peer)) from error

    def _lost(self, peer: Connection) -> str:
        return f"the connection to rank {self._link.ranks[self._link.connections.index(peer)]} is lost"

    def _take(self, peer: Connection, word: object) -> None:
        if isinstance(word, Begin):
            self._sessions.append(
                _Session(peer, word.session, word.is_whole, word.forgets_prompts, list(word.requests))
            )
        elif isinstance(word, More | End):
            for session in [one for one in self._sessions if one.peer is peer and one.number == word.session]:
                if isinstance(word, More):
                    session.requests += word.requests
                    session.cancelled += word.cancelled
                else:
                    session.is_ended = True
        elif isinstance(word, Bye):
            self._peers.remove(peer)
            self._outboxes[peer].close()
        else:
            assert isinstance(word, Load | TakeWeights | Unload), word
            for session in self._sessions if isinstance(word, Unload) else ():
                session.is_ended = True
            self._orders.append((peer, word))

    # --- orders ------------------------------------------------------------------------------------------------

    def _obey(self, peer: Connection, word: Load | TakeWeights | Unload) -> None:
        try:
            if isinstance(word, Load):
                self._say(peer, self._load(word))
            elif isinstance(word, TakeWeights):
                self._say(peer, self._take_weights(word))
            else:
                self._unload()
        except UserError as error:
            self._say(peer, Failed(portable(error)))

    def _load(self, word: Load) -> SpeakerReady:
        note_place("loading the model")
        self._unload()
        torch.set_num_threads(word.threads)
        if word.is_deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        policy = build_policy(word.model, torch.device(word.device), word.seed, word.start_from)
        if list(sent_weights.layout_of(policy)) != list(word.layout):
            raise EngineError(
                "a speaker has loaded a model with other weights than the learners'",
                fix="let all ranks see the same files",
            )
        policy.module.eval()
        options = word.engine
        if word.cache is not None:
            options = options.model_copy(update={"cache_tokens": _with_room(policy, word.cache)})
        engine = make_engine(options, policy, word.seed, self._sink)
        self._policy, self._engine, self._layout = policy, engine, word.layout
        return SpeakerReady(engine.name, engine.context, engine.in_place_of, engine.room)

    def _take_weights(self, word: TakeWeights) -> Taken:
        assert self._engine is not None and self._policy is not None
        note_place("taking weights")
        with self._world.waiting("weights"):
            sent_weights.take(self._policy, self._layout, self._link.carrier, self._link.on_device)
        fault_point("speaker.weights")
        self._engine.update_weights(word.version)
        return Taken(_probe(self._engine, word.prompt))

    def _unload(self) -> None:
        """Give the memory back, and forget what nobody waits for any more."""
        self._sessions.clear()
        if self._engine is not None:
            self._engine.close()
        self._engine = self._policy = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    # --- generating --------------------------------------------------------------------------------------------

    def _work(self) -> None:
        """Go on with the oldest session; the next one's turn comes when that is over."""
        while self._sessions:
            session = self._sessions[0]
            if session.has_news and not session.is_ended:
                self._generate(session)
                if self._orders:
                    return
            elif not (session.is_whole or session.is_ended):
                return
            if (session.is_whole or session.is_ended) and self._sessions:
                self._sessions.popleft()

    def _generate(self, session: _Session) -> None:
        engine = self._engine
        assert engine is not None, "an engine is loaded before a session begins"
        note_place("generate")
        if session.forgets_prompts:
            session.forgets_prompts = False
            engine.forget_prompts()
        began, count, tokens = time.perf_counter(), 0, 0
        said = began
        engine.between = lambda: self._look_up(session, engine)
        try:
            self._feed(session, engine)
            for completion in engine.completions():
                now = time.perf_counter()
                if not session.is_ended:
                    self._say(session.peer, SpokenSample(session.number, completion, now - said))
                    fault_point("speaker.spoken")
                said, count, tokens = now, count + 1, tokens + len(completion.ids)
                self._look_up(session, engine)
        except UserError as error:
            if not session.is_ended:
                self._say(session.peer, Failed(portable(error), session.number))
        finally:
            engine.between = None
        session.keys.clear()
        seconds = time.perf_counter() - began
        self._sink(Said(f"{count} samples, {tokens} tokens in {seconds:.2f} s"))

    def _look_up(self, session: _Session, engine: Engine) -> None:
        """Between two tokens: hear what is said, and change what is being generated accordingly."""
        self._hear(0.0)
        self._feed(session, engine)

    def _feed(self, session: _Session, engine: Engine) -> None:
        requests, session.requests = session.requests, []
        cancelled, session.cancelled = session.cancelled, []
        if session.is_ended:
            requests, cancelled = [], list(session.keys)
            session.keys.clear()
        for request in requests:
            session.keys.add(request.key)
            engine.submit(request)
        for key in cancelled:
            engine.cancel(key)


def _with_room(policy: Policy, wanted: int) -> int:
    """Tokens of a cache: all that are wanted, or what a GPU that holds nothing but the weights has room for."""
    from lemma.engines.native.engine import BLOCK, bytes_per_token

    if policy.device.type != "cuda":
        return wanted
    free, _ = torch.cuda.mem_get_info(policy.device)
    return max(BLOCK, min(wanted, int(CACHE_SHARE * free // bytes_per_token(policy))))


def _probe(engine: Engine, prompt: Sequence[int]) -> ProbeScores:
    """What the engine draws after a prompt, as much of it as the cache holds."""
    room = min(engine.context, engine.context if engine.room is None else engine.room)
    given = list(prompt[: max(1, min(len(prompt), room - NEW_TOKENS))])
    sampling = Sampling(max_tokens=max(1, min(NEW_TOKENS, room - len(given))), ignore_eos=True)
    request = Request(("probe",), np.array(given, dtype=np.int64), sampling)
    (completion,) = generate(engine, [request])
    engine.forget_prompts()
    return ProbeScores([*given, *completion.ids.tolist()], completion.logprobs.tolist())
