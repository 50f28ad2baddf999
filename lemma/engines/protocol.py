"""The protocol of all engines: requests in at any time, completions out as each finishes.

What an engine reports about a sample is defined once, here: its ids, the log-probability of each under the full softmax
at the sampling temperature (as the learner defines it), and, if top-p, top-k or min-p cut the support, the log of the
probability mass that was kept. The sampler's log-probability is their difference.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from lemma.core.errors import UserError
from lemma.core.types import Finish

Key = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are sampled and when a completion ends. Temperature 0 takes the most likely token.

    `stop` strings end a completion and stay in it; so do `stop_ids`, and the tokenizer's end-of-sequence token
    unless `ignore_eos`. A repetition penalty is for inference only: training recipes with one are refused.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """`n` samples for one prompt. The noise of sample i at position t depends on (seed, key, i, t) and nothing else.

    With `stream`, an engine that can reports its tokens as they are sampled (`Engine.new_tokens`).
    """

    key: Key
    prompt: np.ndarray
    sampling: Sampling
    n: int = 1
    stream: bool = False

    @property
    def name(self) -> str:
        """The request's name in error messages."""
        return "/".join(map(str, self.key))


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished sample. `logprobs` and `kept` have one number per id; `kept` is 0 where nothing was cut.

    `seconds` counts from submission to the last token, `first_seconds` to the first. `policy_version` is the version
    that sampled the first token. If the weights were updated on the way, `spans` has a pair for each version: the index
    of its first token, and the version.
    """

    key: Key
    sample: int
    ids: np.ndarray
    logprobs: np.ndarray
    kept: np.ndarray
    finish: Finish
    policy_version: int
    seconds: float = 0.0
    first_seconds: float = 0.0
    spans: tuple[tuple[int, int], ...] = ()

    @property
    def sampler_logprobs(self) -> np.ndarray:
        """Log-probability of each id under the distribution from which it was actually drawn."""
        return self.logprobs - self.kept

    @property
    def order(self) -> tuple[str, int]:
        """The sort key of results: it does not depend on timing."""
        return (repr(self.key), self.sample)


@dataclass(frozen=True, slots=True)
class NewTokens:
    """Tokens of one sample that were sampled together."""

    key: Key
    sample: int
    ids: np.ndarray


class EngineError(UserError):
    """An engine refused a request or failed, in one sentence; the engine stays usable unless the message says
    otherwise."""


class Engine(Protocol):
    """Requests may be submitted and cancelled between two calls of `work`, by the one thread that uses the engine.
    Whoever calls it owns the loop: an engine calls nobody.

    Members with a default here are optional for an engine.
    """

    name: str
    context: int
    """Maximum length of prompt and completion together."""
    in_place_of: str | None = None
    """The engine that was asked for and cannot run this model."""
    finished: deque[Completion]
    """What has finished and was not taken yet."""
    streams_tokens: ClassVar[bool] = False
    """Whether it reports the tokens of requests with `stream` as they are sampled."""
    new_tokens: deque[NewTokens] = deque()  # noqa: RUF012  (that of engines that report none: it stays empty)
    """Tokens of such requests that were not taken yet."""
    sampled_tokens: int = 0
    """Tokens sampled so far, where the engine knows before their completion has finished."""
    device_wait: threading.Event | None = None
    """Set while `work` waits for the device and other threads may use the interpreter."""
    has_own_devices: ClassVar[bool] = False
    """Whether it has devices of its own, so that it generates while the learner works."""
    may_sleep: ClassVar[bool] = False
    """Whether `sleep` frees memory for the learner."""
    updates_in_flight: bool = False
    """Whether unfinished requests continue with the new weights after `update_weights`, and report where they change
    (`Completion.spans`)."""

    @property
    def capacity(self) -> int | None:
        """Tokens that its KV cache holds; None if it manages that by itself."""
        return None

    @property
    def is_busy(self) -> bool:
        """Whether anything that was submitted has not finished."""
        ...

    def work(self) -> None:
        """Generate a few tokens of every sequence, or wait briefly for those who do."""
        ...

    def completions(self) -> Iterator[Completion]:
        """What finishes, until nothing that was submitted is left. Whoever stops halfway loses nothing."""
        while True:
            while self.finished:
                yield self.finished.popleft()
            if not self.is_busy:
                return
            self.work()

    def sleep(self) -> None:
        """Free memory until the next `update_weights`, if the engine can and its options say so."""
        return None

    def take_turns(self) -> None:
        """From now on others wait only for parts of a prompt, not for all of it: for clients who do not know each
        other. The results are the same."""
        return None

    def reset_prefix_cache(self) -> None:
        """Keep nothing of earlier requests, so that no bit of a later one depends on them."""
        return None

    def announce(self, requests: Mapping[int, Sequence[Request]]) -> None:
        """Everything that will be submitted in each slot, in this order; an engine may start on it early."""
        return None

    @contextmanager
    def slot(self, number: int) -> Iterator[None]:
        """All that is submitted and awaited inside `with` belongs to this slot. No bit of it depends on other slots."""
        self.reset_prefix_cache()
        yield

    def submit(self, request: Request) -> None: ...
    def cancel(self, key: Key) -> None: ...
    def drop(self, keys: Sequence[Key]) -> None:
        """Abandon these keys, which must be all that is unfinished: none of their completions is yielded later."""
        with suppress(EngineError):
            for key in keys:
                self.cancel(key)
            for _ in self.completions() if keys else ():
                pass

    def update_weights(self, version: int) -> None:
        """From now on, generate with the policy's weights of this version."""
        ...

    def invalidate(self) -> None:
        """Weights moved in memory, or adapters changed: drop everything derived from them."""
        ...

    def close(self) -> None: ...


def generate(engine: Engine, requests: Iterable[Request]) -> list[Completion]:
    """All completions of these requests, sorted by key and sample."""
    for request in requests:
        engine.submit(request)
    return sorted(engine.completions(), key=lambda completion: completion.order)
