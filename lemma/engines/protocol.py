"""The protocol of all engines: requests in at any time, completions out as each finishes.

The truth about a sample is told here once: its ids, the log-probability of each under the full softmax at the sampling
temperature (the learner's definition), and, where top-p, top-k or min-p cut the support, the log of the mass that was
kept. The behaviour policy's log-probability is their difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Protocol

import numpy as np

from lemma.core.errors import UserError
from lemma.core.types import Finish

Key = tuple[str | int, ...]
# Hears of new tokens as they come: key, sample and ids.
Listener = Callable[[Key, int, np.ndarray], None]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn and when a completion ends. Temperature 0 takes the likeliest token.

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

    @property
    def cuts_support(self) -> bool:
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """`n` samples for one prompt. The noise of sample i at position t depends on (seed, key, i, t) and nothing else."""

    key: Key
    prompt: np.ndarray
    sampling: Sampling
    n: int = 1

    @property
    def name(self) -> str:
        """What errors call it."""
        return "/".join(map(str, self.key))


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished sample. `logprobs` and `kept` have one number per id; `kept` is 0 where nothing was cut.

    `seconds` counts from submission to the last token, `first_seconds` to the first. `policy_version` is the version
    that sampled the first token; where others followed on the way, `spans` has the first token of each, and its number.
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
    def versions(self) -> tuple[tuple[int, int], ...]:
        """The first token of each span and the version that sampled it."""
        return self.spans or ((0, self.policy_version),)

    @property
    def behaviour(self) -> np.ndarray:
        """Log-probability of each id under the distribution it was really drawn from."""
        return self.logprobs - self.kept

    @property
    def order(self) -> tuple[str, int]:
        """Results are sorted by this: it does not depend on timing."""
        return (repr(self.key), self.sample)


class EngineError(UserError):
    """Trouble inside an engine, in one sentence; the engine stays usable unless it says otherwise."""


class Engine(Protocol):
    """`completions` yields until nothing that was submitted is left; more may be submitted and cancelled meanwhile.

    What has a value here is what an engine may leave out.
    """

    name: str
    context: int
    """Longest prompt and completion together."""
    in_place_of: str | None = None
    """The engine that was asked for and does not serve this model."""
    tells: ClassVar[bool] = False
    """Whether it calls `listen`, where that is set, with new tokens as they come."""
    listen: Listener | None = None
    meanwhile: Callable[[], AbstractContextManager[None]] = nullcontext
    """Entered whenever the engine waits for the device and the interpreter is free for others."""
    is_apart: ClassVar[bool] = False
    """Whether it has devices of its own, so that it generates while the learner works."""
    goes_on: bool = False
    """Whether requests that are unfinished at `update_weights` go on with the new weights, and say where that was."""
    between: Callable[[], None] | None = None
    """Called every few tokens while completions are awaited, where requests may be submitted and cancelled."""

    @property
    def room(self) -> int | None:
        """Tokens that its cache holds; None where it looks after that by itself."""
        return None

    @property
    def at_hand(self) -> Sequence[Completion]:
        """Those that `completions` gives next, before it waits for anything."""
        return ()

    def sleep(self) -> None:
        """Give memory back until the next `update_weights`, where the engine can and its options want that."""
        return None

    def forget_prompts(self) -> None:
        """Keep nothing of earlier requests, so that the last bit of a later one does not depend on them."""
        return None

    def foresee(self, requests: Mapping[int, Sequence[Request]]) -> None:
        """What will be submitted within each slot, all of it and in this order: an engine may begin with it."""
        return None

    @contextmanager
    def slot(self, number: int) -> Iterator[None]:
        """Within `with`, all that is submitted and awaited belongs to this slot. No bit of it depends on others."""
        self.forget_prompts()
        yield

    def submit(self, request: Request) -> None: ...
    def cancel(self, key: Key) -> None: ...
    def completions(self) -> Iterator[Completion]: ...
    def drop(self, keys: Sequence[Key]) -> None:
        """Nobody wants these any more, which are all that is unfinished: nothing of them is heard later."""
        with suppress(EngineError):
            for key in keys:
                self.cancel(key)
            for _ in self.completions() if keys else ():
                pass

    def update_weights(self, version: int) -> None:
        """What is generated from now on comes from the policy's weights of this version."""
        ...

    def invalidate(self) -> None:
        """Weights moved in memory, or adapters changed: forget everything that was derived from them."""
        ...

    def close(self) -> None: ...


def generate(engine: Engine, requests: Iterable[Request]) -> list[Completion]:
    """All completions of these requests, sorted by key and sample."""
    for request in requests:
        engine.submit(request)
    return sorted(engine.completions(), key=lambda completion: completion.order)


def check_request(request: Request, context: int) -> None:
    """Refuse what cannot be generated, in one sentence."""
    length = len(request.prompt)
    wrong = _wrong_settings(request.sampling)
    if length == 0:
        wrong = "its prompt is empty"
    elif length >= context:
        wrong = f"its prompt of {length} tokens fills the context of {context}"
    elif request.n < 1:
        wrong = "n is below 1"
    if wrong:
        raise EngineError(f"request {request.name} cannot be generated: {wrong}")


@lru_cache(maxsize=1024)
def _wrong_settings(sampling: Sampling) -> str | None:
    """The first thing that is wrong with them, if any is; most requests come with settings that came before."""
    problems: Sequence[tuple[bool, str]] = (
        (sampling.max_tokens < 1, "max_tokens is below 1"),
        (sampling.temperature < 0, "temperature is below 0"),
        (not 0 < sampling.top_p <= 1, "top_p is not within 0 and 1"),
        (sampling.top_k < 0, "top_k is below 0"),
        (not 0 <= sampling.min_p <= 1, "min_p is not within 0 and 1"),
        (sampling.min_tokens > sampling.max_tokens, "min_tokens is above max_tokens"),
        (sampling.repetition_penalty <= 0, "repetition_penalty is not above 0"),
    )
    return next((text for is_wrong, text in problems if is_wrong), None)
