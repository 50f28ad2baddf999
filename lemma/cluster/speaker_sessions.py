"""What a speaker keeps of a learner: the sessions that it began, and the words that are on their way to it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from queue import SimpleQueue

from lemma.engines.protocol import Engine, Key, Request


@dataclass
class Session:
    """Numbers are the learner's own: two of them may have the same."""

    peer: Connection
    number: int
    requests: list[Request]
    is_whole: bool = False
    resets_prefix_cache: bool = False
    is_partial: bool = False
    cancelled: list[Key] = field(default_factory=list)
    # Of each request that is in the engine, how many samples are unfinished.
    keys: dict[Key, int] = field(default_factory=dict)
    is_ended: bool = False

    @property
    def has_news(self) -> bool:
        return bool(self.requests or self.cancelled)

    @property
    def is_at_work(self) -> bool:
        return bool(self.requests or self.keys)

    def end(self) -> None:
        """Nobody wants anything more of it."""
        self.is_ended = True
        self.requests, self.cancelled = [], list(self.keys)

    def feed(self, engine: Engine) -> None:
        """Hand the news on to the engine."""
        requests, self.requests = self.requests, []
        cancelled, self.cancelled = self.cancelled, []
        for request in requests:
            self.keys[request.key] = request.n
            engine.submit(request)
        for key in cancelled:
            engine.cancel(key)

    def count_off(self, key: Key) -> None:
        """One more sample of a request is finished."""
        self.keys[key] -= 1
        if not self.keys[key]:
            del self.keys[key]


class Outbox:
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
