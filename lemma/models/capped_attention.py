"""Attention with capped scores (Gemma 2): softmax(cap * tanh(scale * q k / cap)) v, in at least float32.

Scores exist for a chunk of queries at a time, in the forward pass and again in the backward pass. A gradient of keys
and values is rounded once, after all chunks.

Shapes: B rows, H heads, Q queries, C of them in a chunk, L keys, D head size, G query heads that share a key head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

# Of one tensor of scores; up to four are alive at once.
SCORE_BYTES = 2**26
# From the first query and the one after the last to a mask that is True where a query sees a key: (C, L), or with
# dimensions for rows and heads before them.
Visible = Callable[[int, int], torch.Tensor]


def capped(
    query_BHQD: torch.Tensor,
    key_BHLD: torch.Tensor,
    value_BHLD: torch.Tensor,
    visible: Visible,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """Attention in the layout (B, H, Q, D); keys and values may have fewer heads than queries."""
    return _Capped.apply(query_BHQD, key_BHLD, value_BHLD, visible, scale, softcap)


class _Capped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        visible: Visible,
        scale: float,
        softcap: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.settings = (visible, scale, softcap)
        wide = _wide(query)
        keys, values, heads = key.to(wide), value.to(wide), key.shape[1]
        out = torch.empty((*query.shape[:-1], value.shape[-1]), dtype=query.dtype, device=query.device)
        for start, end in _chunks(query, key):
            folded = _fold(query[:, :, start:end].to(wide), heads)
            weights = _weights(_tanh(folded, keys, scale / softcap).mul_(softcap), ~visible(start, end))
            out[:, :, start:end] = (weights @ values).view(*out.shape[:2], end - start, -1)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        query, key, value = ctx.saved_tensors
        visible, scale, softcap = ctx.settings
        wide = _wide(query)
        keys, values, heads = key.to(wide), value.to(wide), key.shape[1]
        d_query, d_keys, d_values = torch.empty_like(query), torch.zeros_like(keys), torch.zeros_like(values)
        for start, end in _chunks(query, key):
            folded, pull = (_fold(x[:, :, start:end].to(wide), heads) for x in (query, grads[0]))
            hidden = ~visible(start, end)
            tanh = _tanh(folded, keys, scale / softcap)
            weights = _weights(tanh * softcap, hidden)
            d_values += weights.transpose(-1, -2) @ pull
            mean = (pull * (weights @ values)).sum(-1, keepdim=True)
            d_scores = (pull @ values.transpose(-1, -2)).sub_(mean).mul_(weights)
            _hide_(d_scores, hidden, 0.0)
            d_scores.mul_(tanh.square_().neg_().add_(1)).mul_(scale)
            d_query[:, :, start:end] = (d_scores @ keys).view(*query.shape[:2], end - start, -1)
            d_keys += d_scores.transpose(-1, -2) @ folded
        return d_query, d_keys.to(key.dtype), d_values.to(value.dtype), None, None, None


def _wide(x: torch.Tensor) -> torch.dtype:
    return x.dtype if x.dtype == torch.float64 else torch.float32


def _chunks(query_BHQD: torch.Tensor, key_BHLD: torch.Tensor) -> Iterator[tuple[int, int]]:
    rows, heads, queries, _ = query_BHQD.shape
    one = rows * heads * key_BHLD.shape[2] * _wide(query_BHQD).itemsize
    size = max(1, SCORE_BYTES // max(1, one))
    return ((start, min(start + size, queries)) for start in range(0, queries, size))


def _fold(x_BHCD: torch.Tensor, heads: int) -> torch.Tensor:
    """The queries of all heads that share a key head, one after the other: (B, `heads`, G C, D). Keys need no copy."""
    return x_BHCD.reshape(len(x_BHCD), heads, -1, x_BHCD.shape[-1])


def _tanh(folded: torch.Tensor, keys: torch.Tensor, inner: float) -> torch.Tensor:
    return (folded @ keys.transpose(-1, -2)).mul_(inner).tanh_()


def _weights(scores: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """The softmax of (B, H, G C, L) where nothing is hidden; the scores are overwritten."""
    return _hide_(scores, hidden, torch.finfo(scores.dtype).min).softmax(-1)


def _hide_(scores: torch.Tensor, hidden: torch.Tensor, value: float) -> torch.Tensor:
    by_query = scores.unflatten(2, (-1, hidden.shape[-2]))
    by_query.masked_fill_(hidden if hidden.dim() == 2 else hidden.unsqueeze(-3), value)
    return scores
