"""Sampling noise that depends only on (sequence, position, token).

A token is drawn as the argmax of logits plus Gumbel noise. The noise is a hash: two rounds of a 32-bit mixer over the
token, keyed by the sequence's 64-bit key and the position. The Triton kernel computes the same numbers.
"""

from __future__ import annotations

import numpy as np
import torch

MASK = 0xFFFFFFFF
FIRST, SECOND = 0x7FEB352D, 0x846CA68B
STEP = 0x9E3779B1


def mix(x: torch.Tensor) -> torch.Tensor:
    """A bijection of 32-bit numbers (held in int64) that spreads every input bit over all output bits."""
    x = (x ^ (x >> 16)) * FIRST & MASK
    x = (x ^ (x >> 15)) * SECOND & MASK
    return x ^ (x >> 16)


def split_key(keys: list[int]) -> torch.Tensor:
    """64-bit keys as two columns of 32 bits, (B, 2)."""
    return torch.from_numpy(halves(keys))


def halves(keys: list[int]) -> np.ndarray:
    """Like `split_key`, as a numpy array."""
    whole = np.array(keys, dtype=np.uint64)
    return np.stack([whole & MASK, whole >> 32], axis=1).astype(np.int64)


def row_seeds(keys_B2: torch.Tensor, positions_B: torch.Tensor) -> torch.Tensor:
    """Two 32-bit seeds for each row, (B, 2)."""
    low = mix((keys_B2[:, 0] + positions_B * STEP) & MASK)
    high = mix((keys_B2[:, 1] ^ low) & MASK)
    return torch.stack([low, high], dim=1)


def gumbel(seeds_B2: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Standard Gumbel noise, (B, V), float32."""
    tokens_V = torch.arange(vocabulary, device=seeds_B2.device, dtype=torch.int64)
    hashed = mix((tokens_V[None, :] * STEP + seeds_B2[:, :1]) & MASK)
    hashed = mix(hashed ^ seeds_B2[:, 1:])
    # Small uniforms become large noise, so the small ones need the fine resolution.
    uniform = (hashed.to(torch.float32) + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-uniform.clamp(max=1.0 - 2.0**-24)))
