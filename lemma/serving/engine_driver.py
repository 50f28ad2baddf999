"""One thread uses the engine; any other hands it requests and hears what becomes of them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

import numpy as np

from lemma.core.errors import UserError
from lemma.engines.protocol import Completion, Engine, Key, Listener, Request
from lemma.serving.wire_errors import ApiError

# How often the driver looks around while nothing is to be generated.
IDLE_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Tokens:
    """New tokens of one sample."""

    key: Key
    sample: int
    ids: np.ndarray


News = Tokens | Completion | ApiError


@dataclass(eq=False)
class Call:
    """Requests that belong together and what comes of them, in the order in which it comes."""

    requests: Sequence[Request]
    wants_tokens: bool = False
    is_over: bool = False
    _news: SimpleQueue[News] = field(default_factory=SimpleQueue)

    def tell(self, news: News) -> None:
        self._news.put(news)

    def next(self, seconds: float) -> News | None:
        """What comes next; None where nothing came for so long."""
        try:
            return self._news.get(timeout=seconds)
        except Empty:
            return None


class EngineDriver:
    """`ask` and `drop` from any thread; `run` in the one that uses the engine.

    A request whose key is at work waits until that has ended. Where the engine fails, every call at work hears of it.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self._inbox: deque[Call] = deque()
        self._wake = threading.Event()
        self._waiting: list[tuple[Call, Request]] = []
        self._at_work: dict[Key, Call] = {}
        self._left: dict[Key, int] = {}
        self._look: Callable[[], None] | None = None
        self._listener: Listener | None = None
        self._trouble: BaseException | None = None
        self._lock = threading.Lock()
        self._is_closed = False

    def ask(self, requests: Sequence[Request], *, wants_tokens: bool = False) -> Call:
        call = Call(requests, wants_tokens and self.engine.streams_tokens)
        with self._lock:
            if self._is_closed:
                raise ApiError(503, "the server is closing")
            self._inbox.append(call)
        self._wake.set()
        return call

    def drop(self, call: Call) -> None:
        """Nobody waits for this any more."""
        with self._lock:
            call.is_over = True
            self._inbox.append(call)
        self._wake.set()

    @property
    def at_work(self) -> int:
        """Requests that the engine generates for, or will."""
        return len(self._at_work) + len(self._waiting) + len(self._inbox)

    def wake(self) -> None:
        """Have `look` called soon, also where nothing is generated."""
        self._wake.set()

    def run(
        self, is_over: Callable[[], bool], look: Callable[[], None] | None = None, *, survives_errors: bool = True
    ) -> None:
        """Serve calls until it is over. `look` is called every few tokens, and a few times a second in any case.

        Where the engine fails in one sentence, the driver goes on, unless told otherwise.
        """
        self._look = look
        with self._hearing():
            while not is_over():
                self._wake.clear()
                self._between()
                if not self._at_work:
                    if not is_over():
                        self._wake.wait(IDLE_SECONDS)
                    continue
                try:
                    for completion in self.engine.completions():
                        self._give(completion)
                except UserError as error:
                    if error is self._trouble or not survives_errors:
                        raise
                    self._fail_all(ApiError.of(error, 500))

    @contextmanager
    def _hearing(self) -> Iterator[None]:
        engine = self.engine
        before = self._listener, _ = engine.on_tokens, engine.between_steps
        engine.on_tokens, engine.between_steps = self._hear, self._between
        try:
            yield
        finally:
            engine.on_tokens, engine.between_steps = before
            with self._lock:
                self._is_closed = True
            self._fail_all(ApiError(503, "the server is closing"))

    def _between(self) -> None:
        try:
            self._take()
            if self._look is not None:
                self._look()
        except BaseException as error:
            self._trouble = error
            raise

    def _take(self) -> None:
        while self._inbox:
            call = self._inbox.popleft()
            if call.is_over:
                self._end(call)
            else:
                self._waiting += [(call, request) for request in call.requests]
        waiting, self._waiting = self._waiting, []
        for call, request in waiting:
            if call.is_over:
                continue
            if request.key in self._at_work:
                self._waiting.append((call, request))
            else:
                self._submit(call, request)

    def _submit(self, call: Call, request: Request) -> None:
        try:
            self.engine.submit(request)
        except UserError as error:
            call.tell(ApiError.of(error))
            self._end(call)
            return
        self._at_work[request.key], self._left[request.key] = call, request.n

    def _end(self, call: Call) -> None:
        call.is_over = True
        for key in [key for key, own in self._at_work.items() if own is call]:
            self._forget(key)
            self.engine.cancel(key)

    def _forget(self, key: Key) -> None:
        del self._at_work[key], self._left[key]

    def _hear(self, key: Key, sample: int, ids: np.ndarray) -> None:
        if self._listener is not None:
            self._listener(key, sample, ids)
        call = self._at_work.get(key)
        if call is not None and call.wants_tokens:
            call.tell(Tokens(key, sample, ids))

    def _give(self, completion: Completion) -> None:
        key = completion.key
        call = self._at_work.get(key)
        # What was cancelled belongs to nobody; its key may serve another call by now.
        if call is None or completion.finish == "cancelled":
            return
        self._left[key] -= 1
        if not self._left[key]:
            self._forget(key)
        call.tell(completion)

    def _fail_all(self, error: ApiError) -> None:
        """Tell everybody, and leave nothing in the engine."""
        with self._lock:
            calls = {*self._at_work.values(), *(call for call, _ in self._waiting), *self._inbox}
            self._inbox.clear()
        self._waiting.clear()
        for call in calls:
            if not call.is_over:
                call.tell(error)
            self._end(call)
