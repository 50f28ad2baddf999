"""One thread uses the engine; any other thread can submit requests to it and gets the results."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lemma.core.errors import UserError
from lemma.engines.protocol import Completion, Engine, Key, NewTokens, Request
from lemma.serving.wire_errors import ApiError

# How often the driver polls while there is nothing to generate.
IDLE_SECONDS = 0.2


CallEvent = NewTokens | Completion | ApiError


@dataclass(eq=False)
class Call:
    """Requests that belong together, and what takes their results in order of arrival, in the driver's thread."""

    requests: Sequence[Request]
    put: Callable[[CallEvent], None]
    is_over: bool = False


class EngineDriver:
    """Call `submit` and `drop` from any thread, `run` in the one that uses the engine.

    A request whose key is in use waits until that request has ended and its completions have been delivered. If the
    engine fails, every active call gets the error.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self._inbox: deque[Call] = deque()
        self._wake = threading.Event()
        self._waiting: list[tuple[Call, Request]] = []
        self._active: dict[Key, Call] = {}
        self._left: dict[Key, int] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def submit(self, requests: Sequence[Request], put: Callable[[CallEvent], None]) -> Call:
        call = Call(requests, put)
        with self._lock:
            if self._is_closed:
                raise ApiError(503, "the server is closing")
            self._inbox.append(call)
        self._wake.set()
        return call

    def drop(self, call: Call) -> None:
        """Cancel a call whose client no longer waits."""
        with self._lock:
            call.is_over = True
            self._inbox.append(call)
        self._wake.set()

    @property
    def active(self) -> int:
        """The number of requests that are running or waiting."""
        return len(self._active) + len(self._waiting) + len(self._inbox)

    def wake(self) -> None:
        """Have `poll` called soon, even if nothing is being generated."""
        self._wake.set()

    def run(
        self, is_over: Callable[[], bool], poll: Callable[[], None] | None = None, *, survives_errors: bool = True
    ) -> None:
        """Serve calls until `is_over`. `poll` is called every few tokens, and at least a few times a second.

        After an EngineError or another UserError of the engine the driver continues, unless `survives_errors` is False.
        """
        try:
            while not is_over():
                self._wake.clear()
                if poll is not None:
                    poll()
                if not self.step(survives_errors=survives_errors) and not is_over():
                    self._wake.wait(IDLE_SECONDS)
        finally:
            with self._lock:
                self._is_closed = True
            self._fail_all(ApiError(503, "the server is closing"))

    def step(self, *, survives_errors: bool = True) -> bool:
        """Take what was asked for, generate a few tokens, pass on what has come; whether there was anything to do."""
        engine, was_asked = self.engine, bool(self._inbox)
        self._take_inbox()
        if not (engine.is_busy or engine.finished):
            return was_asked
        try:
            if engine.is_busy:
                engine.work()
        except UserError as error:
            if not survives_errors:
                raise
            self._fail_all(ApiError.of(error, 500))
        self._deliver()
        return True

    def _take_inbox(self) -> None:
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
            if request.key in self._active:
                self._waiting.append((call, request))
            else:
                self._submit(call, request)

    def _submit(self, call: Call, request: Request) -> None:
        try:
            self.engine.submit(request)
        except UserError as error:
            call.put(ApiError.of(error))
            self._end(call)
            return
        self._active[request.key], self._left[request.key] = call, request.n

    def _end(self, call: Call) -> None:
        call.is_over = True
        for key in [key for key, own in self._active.items() if own is call]:
            self._forget(key)
            self.engine.cancel(key)

    def _forget(self, key: Key) -> None:
        del self._active[key], self._left[key]

    def _deliver(self) -> None:
        """Pass on what was sampled, to calls whose clients still wait."""
        engine = self.engine
        while engine.new_tokens:
            tokens = engine.new_tokens.popleft()
            if (call := self._waiting_for(tokens.key)) is not None:
                call.put(tokens)
        while engine.finished:
            completion = engine.finished.popleft()
            key = completion.key
            # The key of a cancelled completion may be another call's by now.
            if completion.finish == "cancelled" or (call := self._waiting_for(key)) is None:
                continue
            self._left[key] -= 1
            if not self._left[key]:
                self._forget(key)
            call.put(completion)

    def _waiting_for(self, key: Key) -> Call | None:
        call = self._active.get(key)
        return None if call is None or call.is_over else call

    def _fail_all(self, error: ApiError) -> None:
        """Send the error to every call, and leave nothing in the engine."""
        with self._lock:
            calls = {*self._active.values(), *(call for call, _ in self._waiting), *self._inbox}
            self._inbox.clear()
        self._waiting.clear()
        for call in calls:
            if not call.is_over:
                call.put(error)
            self._end(call)
