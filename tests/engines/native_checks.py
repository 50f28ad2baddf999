"""What several tests of the native engine do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from lemma.engines.native.engine import NativeEngine
from lemma.engines.protocol import Completion, Request, Sampling, generate
from lemma.models.policy import Policy

GREEDY = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)
FREE = Sampling(max_tokens=12, ignore_eos=True)


def requests_of(prompts: Iterable[np.ndarray], sampling: Sampling, n: int = 1) -> list[Request]:
    return [Request(("test", i), prompt, sampling, n) for i, prompt in enumerate(prompts)]


def engine_of(policy: Policy, seed: int = 0, **settings: Any) -> NativeEngine:
    """A small cache, so that tests start at once."""
    return NativeEngine(policy, seed, **{"cache_tokens": 4096, "max_sequences": 64, **settings})


def run(policy: Policy, requests: list[Request], seed: int = 0, **settings: Any) -> list[Completion]:
    engine = engine_of(policy, seed, **settings)
    found = generate(engine, requests)
    check_at_rest(engine)
    return found


def check_at_rest(engine: NativeEngine) -> None:
    """Nothing is at work, so every block is free and owned by nobody."""
    assert engine.scheduler.is_idle
    assert engine.pool.free == engine.pool.count
    assert not any(engine.pool._owners)


def ids_of(completions: list[Completion]) -> list[tuple[object, int, list[int]]]:
    return [(c.key, c.sample, c.ids.tolist()) for c in completions]


def check_same(some: list[Completion], others: list[Completion]) -> None:
    """The same tokens and ends, and the same numbers up to the rounding of float32."""
    assert ids_of(some) == ids_of(others)
    assert [c.finish for c in some] == [c.finish for c in others]
    for one, other in zip(some, others, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
        np.testing.assert_allclose(one.kept, other.kept, atol=1e-5)
