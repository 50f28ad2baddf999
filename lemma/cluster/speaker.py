"""A rank that only generates: it holds the model's weights and an engine, and no optimiser.

It does what learners ask for, one session at a time and in the order in which they began. Whatever depends on time here
decides when a sample is finished, and never what it is. Sessions that fly are served together, and new weights reach
them between two bursts of tokens.
"""

from __future__ import annotations

import gc
import os
import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from types import FrameType

import numpy as np
import torch

from lemma.cluster.speaker_sessions import Outbox, Session
from lemma.core.errors import UserError
from lemma.core.events import Said, Sink
from lemma.core.faults import fault_point
from lemma.core.ranks import IDLE, RankWorld, note_place, portable
from lemma.engines import make_engine, weight_broadcast
from lemma.engines.protocol import Engine, EngineError, Request, Sampling, generate
from lemma.engines.remote.weights_probe import NEW_TOKENS, ProbeScores, policy_logprobs
from lemma.engines.speaker_messages import (
    Begin,
    Bye,
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
from lemma.models.load_model import build_policy
from lemma.models.policy import Policy

# How long a speaker without work waits before it looks whether it was asked to stop.
IDLE_SECONDS = 0.5
# How often one that generates says so, at least.
SIGN_SECONDS = 10.0
# Share of the memory that is free on a GPU once the weights are there.
CACHE_SHARE = 0.85


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
        self._outboxes = {peer: Outbox(peer) for peer in self._peers}
        self._sessions: deque[Session] = deque()
        self._aloft: list[Session] = []
        # What is done between two sessions' works. Weights reach those that fly; nothing else is done meanwhile.
        self._orders: deque[tuple[Connection, Load | TakeWeights | Unload]] = deque()
        self._policy: Policy | None = None
        self._engine: Engine | None = None
        self._layout: weight_broadcast.Layout = ()
        self._stops, self._is_stop_told = 0, False
        self._signed = time.monotonic()

    def run(self) -> None:
        while self._peers:
            self._hear(0.0 if self._is_busy else IDLE_SECONDS)
            while self._orders:
                self._obey(*self._orders.popleft())
            self._work()

    @property
    def _is_busy(self) -> bool:
        if self._orders or self._engine is None:
            return bool(self._orders)
        if self._sessions:
            first = self._sessions[0]
            return first.has_news or first.is_whole or first.is_ended
        return any(session.has_news for session in self._aloft)

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
            session = Session(
                peer, word.session, list(word.requests), word.is_whole, word.resets_prefix_cache, word.is_partial
            )
            (self._aloft if word.is_partial else self._sessions).append(session)
        elif isinstance(word, More | End):
            for session in self._all_sessions():
                if session.peer is not peer or session.number != word.session:
                    continue
                if isinstance(word, More):
                    session.requests += word.requests
                    session.cancelled += word.cancelled
                else:
                    session.end()
        elif isinstance(word, Bye):
            self._peers.remove(peer)
            self._outboxes[peer].close()
        else:
            assert isinstance(word, Load | TakeWeights | Unload), word
            for session in self._all_sessions() if isinstance(word, Unload) else ():
                session.end()
            self._orders.append((peer, word))

    def _all_sessions(self) -> list[Session]:
        return [*self._sessions, *self._aloft]

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
        if list(weight_broadcast.layout_of(policy)) != list(word.layout):
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
        return SpeakerReady(engine.name, engine.context, engine.in_place_of, engine.capacity, engine.updates_in_flight)

    def _take_weights(self, word: TakeWeights) -> Taken:
        engine, policy = self._engine, self._policy
        assert engine is not None and policy is not None
        note_place("taking weights")
        with self._world.waiting("weights"):
            weight_broadcast.take(policy, self._layout, self._link.carrier, self._link.on_device)
        fault_point("speaker.weights")
        engine.update_weights(word.version)
        return Taken(_scored(policy, word.prompt) if engine.is_busy else _probe(engine, word.prompt))

    def _unload(self) -> None:
        """Give the memory back, and forget what nobody waits for any more."""
        self._sessions.clear()
        self._aloft.clear()
        if self._engine is not None:
            self._engine.close()
        self._engine = self._policy = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    # --- generating --------------------------------------------------------------------------------------------

    def _work(self) -> None:
        """Go on with the oldest session; the next one's turn comes when that is over. When there is none, those with
        partial rollouts go on until there is nothing of them."""
        while self._engine is not None and not self._orders:
            if self._sessions:
                session = self._sessions[0]
                is_fed = session.has_news and not session.is_ended
                if is_fed:
                    self._generate([session], self._engine)
                if session.is_whole or session.is_ended:
                    self._sessions.popleft()
                elif not is_fed:
                    return
            elif any(session.has_news for session in self._aloft):
                self._generate(self._aloft, self._engine)
                self._aloft = [session for session in self._aloft if not session.is_ended]
            else:
                return

    def _generate(self, sessions: Sequence[Session], engine: Engine) -> None:
        """Until nothing of these sessions is in the engine; there may be more of those that fly meanwhile."""
        note_place("generate")
        for session in sessions:
            if session.resets_prefix_cache:
                session.resets_prefix_cache = False
                engine.reset_prefix_cache()
        began, count, tokens = time.perf_counter(), 0, 0
        said = began
        try:
            self._look_up(sessions, engine)
            while engine.is_busy or engine.finished:
                engine.work()
                while engine.finished:
                    completion, now = engine.finished.popleft(), time.perf_counter()
                    session = next(one for one in sessions if completion.key in one.keys)
                    session.count_off(completion.key)
                    if not session.is_ended:
                        self._say(session.peer, SpokenSample(session.number, completion, now - said))
                        fault_point("speaker.spoken")
                    said, count, tokens = now, count + 1, tokens + len(completion.ids)
                self._look_up(sessions, engine)
        except UserError as error:
            self._give_up(sessions, engine, error)
        seconds = time.perf_counter() - began
        self._sink(Said(f"{count} samples, {tokens} tokens in {seconds:.2f} s"))

    def _give_up(self, sessions: Sequence[Session], engine: Engine, error: UserError) -> None:
        """Those who have anything in the engine hear why they do not get it, and nothing of it stays there."""
        keys = [key for session in sessions for key in session.keys]
        for session in sessions:
            if session.is_at_work and not session.is_ended:
                self._say(session.peer, Failed(portable(error), session.number))
            session.requests, session.cancelled, session.keys = [], [], {}
        engine.drop(keys)

    def _look_up(self, sessions: Sequence[Session], engine: Engine) -> None:
        """Between two tokens: hear what is said, and change what is being generated accordingly."""
        self._hear(0.0)
        if time.monotonic() - self._signed > min(SIGN_SECONDS, self._link.deadline / 4):
            self._signed = time.monotonic()
            for peer in {session.peer for session in self._all_sessions()}:
                self._say(peer, Heartbeat())
        while sessions is self._aloft and self._orders and isinstance(self._orders[0][1], TakeWeights):
            self._obey(*self._orders.popleft())
            note_place("generate")
        for session in sessions:
            session.feed(engine)


def _with_room(policy: Policy, wanted: int) -> int:
    """Tokens of a cache: all that are wanted, or what a GPU that holds nothing but the weights has room for."""
    from lemma.engines.native.engine import BLOCK
    from lemma.engines.native.sizes import bytes_per_token

    if policy.device.type != "cuda":
        return wanted
    free, _ = torch.cuda.mem_get_info(policy.device)
    return max(BLOCK, min(wanted, int(CACHE_SHARE * free // bytes_per_token(policy))))


def _scored(policy: Policy, prompt: Sequence[int]) -> ProbeScores:
    """What the policy says about a prompt, where the engine has other work: they share their weights."""
    return ProbeScores(list(prompt), policy_logprobs(policy, list(prompt)).tolist())


def _probe(engine: Engine, prompt: Sequence[int]) -> ProbeScores:
    """What the engine draws after a prompt, as much of it as the cache holds."""
    room = min(engine.context, engine.context if engine.capacity is None else engine.capacity)
    given = list(prompt[: max(1, min(len(prompt), room - NEW_TOKENS))])
    sampling = Sampling(max_tokens=max(1, min(NEW_TOKENS, room - len(given))), ignore_eos=True)
    request = Request(("probe",), np.array(given, dtype=np.int64), sampling)
    (completion,) = generate(engine, [request])
    engine.reset_prefix_cache()
    return ProbeScores([*given, *completion.ids.tolist()], completion.logprobs.tolist())
