"""An engine that says what a test wants it to say, token by token as a real one would."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from lemma.core.types import Finish
from lemma.engines.protocol import Completion, Engine, Key, Request

Line = Callable[[Request, int], str]


class Scripted(Engine):
    """`say` gives the text of each sample; it ends with the end-of-sequence token, or is cut off at max_tokens."""

    name = "scripted"
    context = 2**31

    def __init__(self, tokenizer: Any, say: Line):
        self.tokenizer, self.say = tokenizer, say
        self.asked: list[Request] = []
        self._waiting: list[Request] = []
        self._version = 0
        self.finished = deque[Completion]()
        self._spoken = deque[Completion]()

    def submit(self, request: Request) -> None:
        assert 0 <= request.sampling.min_tokens <= request.sampling.max_tokens > 0
        self.asked.append(request)
        self._waiting.append(request)

    def cancel(self, key: Key) -> None:
        self._waiting = [request for request in self._waiting if request.key != key]
        self._spoken = deque(one for one in self._spoken if one.key != key)

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting or self._spoken)

    def work(self) -> None:
        """One more sample is finished; the last request that was submitted is the first."""
        if not self._spoken and self._waiting:
            self._spoken.extend(self.samples(self._waiting.pop()))
        if self._spoken:
            self.finished.append(self._spoken.popleft())

    def samples(self, request: Request) -> list[Completion]:
        samples = []
        for sample in range(request.n):
            ids = [*self.tokenizer.encode(self.say(request, sample)), self.tokenizer.eos_token_id]
            row = np.array(ids[: request.sampling.max_tokens], dtype=np.int32)
            zeros = np.zeros(len(row), dtype=np.float32)
            finish: Finish = "stop" if len(row) == len(ids) else "length"
            samples.append(Completion(request.key, sample, row, zeros - 1, zeros, finish, self._version))
        return samples

    def update_weights(self, version: int) -> None:
        self._version = version

    def invalidate(self) -> None:
        pass

    def close(self) -> None:
        pass


class Silent(Scripted):
    """An engine that must not be asked."""

    def __init__(self) -> None:
        super().__init__(None, lambda request, sample: "")

    def submit(self, request: Request) -> None:
        raise AssertionError(f"{request.key} was generated although it is known")
