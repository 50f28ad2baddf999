"""Named random streams: every random number is a function of the run's seed and a name, never of history.

A stream is keyed by its purpose, `stream(seed, "sft", "order", epoch)`, so no random state has to be saved, and nothing
depends on batching, scheduling or a restart.
"""

from __future__ import annotations

import hashlib

import numpy as np


def key(seed: int, *name: str | int) -> int:
    """A 64-bit key for a named stream; different names give unrelated keys."""
    text = "\x1f".join([str(seed), *(f"{type(part).__name__}:{part}" for part in name)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def stream(seed: int, *name: str | int) -> np.random.Generator:
    """The random stream of that name, from its start."""
    return np.random.Generator(np.random.Philox(key=key(seed, *name)))


def permutation(count: int, seed: int, *name: str | int) -> np.ndarray:
    """A random permutation of 0 to `count` - 1, from the stream of that name."""
    return stream(seed, *name).permutation(count)
