"""Attention over the paged cache, as the model calls it: `cached(layer, query, key, value, cos, sin, scale, window,
softcap)`.

A context is made for one forward pass and passed to the model as an argument. If `cos` is given, queries and keys are
not rotated yet. Shapes: T tokens of the pass, B rows, H heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

from lemma.models.attention import has_varlen, rows_seen, window_mask
from lemma.models.blocks import rotate
from lemma.models.capped_attention import capped
from lemma.models.packing import Segments, to_device
from lemma.models.varlen_attention import AttentionSpec, varlen

ARRIVALS = 1024
# Maximum bytes of blocks that are copied at once, through a temporary tensor.
COPIED = 2**27


class Cache:
    """Keys and values of all layers: (layers, slots, heads, size). Their memory can be released and allocated again.

    `addresses_L2` holds each layer's addresses of keys and values and never moves itself: kernels read it, so captured
    graphs stay valid when the cache moves.
    """

    def __init__(
        self, layers: int, blocks: int, block: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device
    ):
        self.block = block
        self.shape = (layers, blocks * block, heads, dim)
        self._dtype, self._device = dtype, device
        self.addresses_L2 = torch.zeros(layers, 2, dtype=torch.int64, device=device)
        # Counters of the kernel that splits contexts: zero between launches.
        self.arrivals = torch.zeros(ARRIVALS, dtype=torch.int32, device=device)
        self.allocate()

    @property
    def bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def allocate(self) -> None:
        """Allocate memory for every slot. Its address may differ from the last one."""
        keys, values = (torch.zeros(self.shape, dtype=self._dtype, device=self._device) for _ in range(2))
        self.keys, self.values = keys, values
        self.addresses_L2.copy_(layer_addresses(keys, values))

    def release(self) -> None:
        self.keys = self.values = torch.empty(0, dtype=self._dtype, device=self._device)
        self.addresses_L2.zero_()

    def clear(self) -> None:
        """Plain attention multiplies masked values by 0, so nothing in here may be NaN."""
        self.keys.zero_()
        self.values.zero_()

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy whole blocks, given as pairs (from, to), in every layer. Targets are distinct, and none is a source."""
        if not copies:
            return
        layers, slots, heads, dim = self.shape
        pairs = to_device(np.array(copies).T, self._device)
        views = [x.view(layers, slots // self.block, self.block * heads * dim) for x in (self.keys, self.values)]
        at_once = max(1, COPIED // views[0][:, 0].nbytes)
        for start in range(0, len(copies), at_once):
            by, to = pairs[:, start : start + at_once]
            for view in views:
                view[:, to] = view[:, by]


def layer_addresses(keys_LSHD: torch.Tensor, values_LSHD: torch.Tensor) -> torch.Tensor:
    """The addresses of each layer's keys and values, (L, 2), as kernels read them."""
    addresses = [[x.data_ptr() for x in layer] for layer in zip(keys_LSHD, values_LSHD, strict=True)]
    return torch.tensor(addresses, device=keys_LSHD.device)


@dataclass
class PrefillContext:
    """New tokens of several sequences, concatenated; each attends to its earlier tokens in the cache and its new ones.

    `slots_T` is the cache slot of each new token. `sources` are the slots of all tokens of all sequences, cached and
    new; None if no sequence has cached tokens.
    """

    cache: Cache
    slots_T: torch.Tensor
    new: Segments
    all: Segments
    sources: torch.Tensor | None
    fused: bool

    def __call__(
        self,
        layer: int,
        query_THD: torch.Tensor,
        key_THD: torch.Tensor,
        value_THD: torch.Tensor,
        cos_TD: torch.Tensor | None,
        sin_TD: torch.Tensor | None,
        scale: float,
        window: int | None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        if cos_TD is not None and sin_TD is not None:
            query_THD, key_THD = rotate(query_THD, key_THD, cos_TD, sin_TD, self.fused)
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self.slots_T], values[self.slots_T] = key_THD, value_THD
        if self.sources is not None:
            key_THD, value_THD = keys[self.sources], values[self.sources]
        if has_varlen(query_THD, value_THD, softcap):
            return varlen(query_THD, key_THD, value_THD, AttentionSpec(self.new, self.all, scale, window))
        return self._each(query_THD, key_THD, value_THD, scale, window, softcap)

    def _each(
        self,
        query_THD: torch.Tensor,
        key_THD: torch.Tensor,
        value_THD: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """Exact attention, one sequence at a time; a sequence's new tokens are its last."""
        pieces = []
        for query, key, value in zip(
            query_THD.split(self.new.lengths),
            key_THD.split(self.all.lengths),
            value_THD.split(self.all.lengths),
            strict=True,
        ):
            if softcap is not None:
                visible = rows_seen(len(key), len(query), window, query.device)
                query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
                pieces.append(capped(query, key, value, visible, scale, softcap)[0].transpose(0, 1))
                continue
            mask = window_mask(len(key), window or len(key), query.device, len(key) - len(query))
            pieces.append(_grouped(query[None], key[None], value[None], mask[None, None], scale, None)[0])
        return torch.cat(pieces)


@dataclass
class DecodeContext:
    """One new token per row. `table_BM` holds the blocks of each row, `lengths_B` its length with the new token."""

    cache: Cache
    table_BM: torch.Tensor
    lengths_B: torch.Tensor
    slots_B: torch.Tensor
    fused: bool
    # The slots and masks of the rows; the same in all layers of a pass with the same window.
    _seen: dict[int | None, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def __call__(
        self,
        layer: int,
        query_BHD: torch.Tensor,
        key_BHD: torch.Tensor,
        value_BHD: torch.Tensor,
        cos_BD: torch.Tensor | None,
        sin_BD: torch.Tensor | None,
        scale: float,
        window: int | None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        if self.fused:
            from lemma.engines.native import engine_kernels as fused

            new = (query_BHD, key_BHD, value_BHD, cos_BD, sin_BD, self.slots_B)
            where = (
                self.cache.addresses_L2[layer],
                self.cache.arrivals,
                self.table_BM,
                self.lengths_B,
                self.cache.block,
            )
            return fused.attend_and_write(*new, *where, scale, window, softcap)
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        if cos_BD is not None and sin_BD is not None:
            query_BHD, key_BHD = rotate(query_BHD, key_BHD, cos_BD, sin_BD, False)
        keys[self.slots_B], values[self.slots_B] = key_BHD, value_BHD
        if window not in self._seen:
            self._seen[window] = seen_by_rows(self.table_BM, self.lengths_B, self.cache.block, window)
        return over_slots(query_BHD, keys, values, *self._seen[window], scale, softcap)


def seen_by_rows(
    table_BM: torch.Tensor, lengths_B: torch.Tensor, block: int, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The slots of each row's tokens, (B, L) where L is the longest row, and a mask of those it attends to."""
    longest = int(lengths_B.max())
    token_L = torch.arange(longest, device=table_BM.device)
    slots_BL = table_BM[:, token_L // block].long() * block + token_L % block
    visible_BL = token_L[None, :] < lengths_B[:, None]
    if window is not None:
        visible_BL &= token_L[None, :] >= lengths_B[:, None] - window
    return slots_BL, visible_BL


def over_slots(
    query_BHD: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots_BL: torch.Tensor,
    visible_BL: torch.Tensor,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    # `index_select` of whole rows is several times faster than indexing.
    key, value = (x.flatten(1).index_select(0, slots_BL.flatten()) for x in (keys, values))
    key_BLHD, value_BLHD = (x.view(*slots_BL.shape, *whole.shape[1:]) for x, whole in ((key, keys), (value, values)))
    return _grouped(query_BHD[:, None], key_BLHD, value_BLHD, visible_BL[:, None, None, :], scale, softcap)[:, 0]


def _grouped(
    query_BQHD: torch.Tensor,
    key_BLHD: torch.Tensor,
    value_BLHD: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """Scaled dot-product attention where several query heads share a key head; (B, Q, H, D)."""
    groups = query_BQHD.shape[2] // key_BLHD.shape[2]
    query, key, value = (x.transpose(1, 2) for x in (query_BQHD, key_BLHD, value_BLHD))
    if softcap is not None:
        return capped(query, key, value, lambda start, end: mask[..., start:end, :], scale, softcap).transpose(1, 2)
    # The CPU kernel reads shared heads in place, bit-identical to repeating them.
    in_place = groups > 1 and query.device.type == "cpu"
    if groups > 1 and not in_place:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    return F.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=in_place).transpose(1, 2)
