"""What the decoding kernel is compared with."""

from __future__ import annotations

import torch

from lemma.engines.native.cached_attention import over_slots, seen_by_rows


def decode_reference(
    query_BHD: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table_BM: torch.Tensor,
    lengths_B: torch.Tensor,
    block: int,
    scale: float,
    window: int | None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attention of one new token per row over its blocks, in plain torch: the reference for the kernel."""
    seen = seen_by_rows(table_BM, lengths_B, block, window)
    return over_slots(query_BHD, keys, values, *seen, scale, softcap)
