"""An engine that says what a test wants it to say, token by token as a real one would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

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

    def submit(self, request: Request) -> None:
        assert 0 <= request.sampling.min_tokens <= request.sampling.max_tokens > 0
        self.asked.append(request)
        self._waiting.append(request)

    def cancel(self, key: Key) -> None:
        self._waiting = [request for request in self._waiting if request.key != key]

    def completions(self) -> Iterator[Completion]:
        """The last one asked is the first to finish."""
        while self._waiting:
            request = self._waiting.pop()
            for sample in range(request.n):
                ids = [*self.tokenizer.encode(self.say(request, sample)), self.tokenizer.eos_token_id]
                cut = ids[: request.sampling.max_tokens]
                zeros = np.zeros(len(cut), dtype=np.float32)
                finish = "stop" if len(cut) == len(ids) else "length"
                yield Completion(
                    request.key, sample, np.array(cut, dtype=np.int32), zeros - 1, zeros, finish, self._version
                )

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
