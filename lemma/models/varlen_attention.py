"""torch's variable-length kernel: attention over a pack on a GPU, within each of its sequences."""

from __future__ import annotations

import inspect
from functools import cache
from typing import NamedTuple

import torch

from lemma.models.packing import Segments


class AttentionSpec(NamedTuple):
    """What attention over a pack needs besides its tensors. Where a sequence has more keys than queries, the queries
    are its last tokens. `window` counts tokens to the left, the token itself included."""

    queries: Segments
    keys: Segments
    scale: float
    window: int | None


def varlen(
    query_THD: torch.Tensor, key_THD: torch.Tensor, value_THD: torch.Tensor, spec: AttentionSpec
) -> torch.Tensor:
    """Attention (T, H, D) over a pack."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn(
        query_THD,
        key_THD,
        value_THD,
        spec.queries.borders_B1,
        spec.keys.borders_B1,
        spec.queries.longest,
        spec.keys.longest,
        scale=spec.scale,
        # The kernel's window does not count the token itself.
        window_size=(-1 if spec.window is None else spec.window - 1, 0),
        **_gqa_argument(query_THD.shape[1] != key_THD.shape[1]),
    )


@cache
def _varlen_wants_gqa() -> bool:
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _gqa_argument(grouped: bool) -> dict[str, bool]:
    return {"enable_gqa": grouped} if _varlen_wants_gqa() else {}
