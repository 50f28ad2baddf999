"""The Triton kernel for decoding: rotary embedding, the cache write and attention over blocks, in one launch.

It is a backend of the plain code in `cached_attention.py` and `blocks.py` and is tested against it. Arithmetic is in
float32. The addresses of a layer's keys and values are read from device memory (`addresses_2`, see `Cache`), so that a
captured graph stays valid when the cache moves.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lemma.models.kernels import tanh

# Enough programs to fill a large GPU; contexts are split if the batch alone does not give as many.
WANTED_PROGRAMS = 528
MAX_SPLITS = 32


@triton.jit
def _at(PLACES, which, LIKE):
    """A pointer read from memory, with a hint to the compiler that it is aligned."""
    place = tl.load(PLACES + which).to(tl.pointer_type(LIKE.dtype.element_ty))
    return tl.multiple_of(place, 16)


@triton.jit
def _rotated(x, swapped, cos, sin, first):
    """Rotary embedding. `swapped` holds the other half of the head; `first` is true for elements of the first half."""
    there = swapped.to(tl.float32) * sin
    return (x.to(tl.float32) * cos + tl.where(first, -there, there)).to(x.dtype)


@triton.jit
def _attend(
    Q, K_NEW, V_NEW, COS, SIN, SLOT, PLACES, TABLE, LENGTH, OUT, PART, STATS, ARRIVED, q_stride, k_stride, v_stride,
    scale, cap, table_stride, window, splits, ROTATE: tl.constexpr, HK: tl.constexpr, G: tl.constexpr,
    GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    SPLIT: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    # Short contexts are latency-bound: independent loads are issued together, and stores come last.
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    length = tl.load(LENGTH + row)
    K, V = _at(PLACES, 0, Q), _at(PLACES, 1, Q)
    g = tl.arange(0, GP)
    d = tl.arange(0, DP)
    n = tl.arange(0, TILE)
    inside = d < D
    first = d < D // 2
    queries = Q + row * q_stride + (head * G + g[:, None]) * D
    key = K_NEW + row * k_stride + head * D
    q_mask = (g[:, None] < G) & inside[None, :]
    q = tl.load(queries + d[None, :], mask=q_mask, other=0.0)
    k_new = tl.load(key + d, mask=inside, other=0.0)
    v_new = tl.load(V_NEW + row * v_stride + head * D + d, mask=inside, other=0.0)
    if ROTATE:
        swapped = tl.where(first, d + D // 2, d - D // 2)
        cos = tl.load(COS + row * D + d, mask=inside, other=0.0).to(tl.float32)
        sin = tl.load(SIN + row * D + d, mask=inside, other=0.0).to(tl.float32)
        q_swapped = tl.load(queries + swapped[None, :], mask=q_mask, other=0.0)
        k_swapped = tl.load(key + swapped, mask=inside, other=0.0)
        q = _rotated(q, q_swapped, cos[None, :], sin[None, :], first[None, :])
        k_new = _rotated(k_new, k_swapped, cos, sin, first)
    # The new token is not in the cache yet: split 0 starts with it.
    top = tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[None, :], 1) * scale
    if CAPPED:
        top = cap * tanh(top / cap)
    top = tl.where(split == 0, top, -1e30)
    total = tl.zeros([GP], tl.float32) + tl.where(split == 0, 1.0, 0.0)
    acc = tl.zeros([GP, DP], tl.float32) + tl.where(split == 0, v_new.to(tl.float32), 0.0)[None, :]
    first_token = tl.maximum(length - window, 0)
    tiles = tl.cdiv(length - 1, TILE)
    first_tile = first_token // TILE
    per_split = tl.cdiv(tiles - first_tile, splits)
    begin = first_tile + split * per_split
    for number in range(begin, tl.minimum(begin + per_split, tiles)):
        token = number * TILE + n
        block = tl.load(TABLE + row * table_stride + number * TILE // BLOCK).to(tl.int64)
        place_n = ((block * BLOCK + token % BLOCK) * HK + head) * D
        visible = (token < length - 1) & (token >= first_token)
        k = tl.load(K + place_n[None, :] + d[:, None], mask=visible[None, :] & inside[:, None], other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        if CAPPED:
            scores = cap * tanh(scores / cap)
        scores = tl.where(visible[None, :], scores, -1e30)
        higher = tl.maximum(top, tl.max(scores, 1))
        p = tl.exp(scores - higher[:, None])
        shrink = tl.exp(top - higher)
        total = total * shrink + tl.sum(p, 1)
        v = tl.load(V + place_n[:, None] + d[None, :], mask=visible[:, None] & inside[None, :], other=0.0)
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        top = higher
    if split == 0:
        place = (tl.load(SLOT + row) * HK + head) * D
        tl.store(K + place + d, k_new, mask=inside)
        tl.store(V + place + d, v_new, mask=inside)
    target = OUT + (row * HK + head) * G * D + g[:, None] * D + d[None, :]
    if SPLIT:
        mine = row * HK + head
        here = mine * splits + split
        tl.store(PART + here * GP * DP + g[:, None] * DP + d[None, :], acc)
        tl.store(STATS + here * 2 * GP + g, top)
        tl.store(STATS + here * 2 * GP + GP + g, total)
        tl.debug_barrier()
        if tl.atomic_add(ARRIVED + mine, 1, sem="acq_rel") == splits - 1:
            _combine_splits(PART, STATS, target, q_mask, mine, splits, GP, DP)
            tl.store(ARRIVED + mine, 0)
    else:
        tl.store(target, (acc / total[:, None]).to(OUT.dtype.element_ty), mask=q_mask)


@triton.jit
def _combine_splits(PART, STATS, target, mask, mine, splits, GP: tl.constexpr, DP: tl.constexpr):
    """Combine the splits of one head, always in the same order; run by the program that arrives last."""
    g = tl.arange(0, GP)
    d = tl.arange(0, DP)
    top = tl.full([GP], -1e30, tl.float32)
    total = tl.zeros([GP], tl.float32)
    acc = tl.zeros([GP, DP], tl.float32)
    for split in range(0, splits):
        here = mine * splits + split
        # Other programs wrote these, so this one's L1 cache may be stale: read through L2.
        part = tl.load(PART + here * GP * DP + g[:, None] * DP + d[None, :], cache_modifier=".cg")
        its_top = tl.load(STATS + here * 2 * GP + g, cache_modifier=".cg")
        its_total = tl.load(STATS + here * 2 * GP + GP + g, cache_modifier=".cg")
        higher = tl.maximum(top, its_top)
        old, its = tl.exp(top - higher), tl.exp(its_top - higher)
        total = total * old + its_total * its
        acc = acc * old[:, None] + part * its[:, None]
        top = higher
    tl.store(target, (acc / total[:, None]).to(target.dtype.element_ty), mask=mask)


def splits_for(rows: int, kv_heads: int) -> int:
    """The number of splits of a context, so that a small batch still fills the GPU."""
    return max(1, min(MAX_SPLITS, WANTED_PROGRAMS // (rows * kv_heads)))


def shape_of(programs: int, width: int, block: int) -> dict[str, int]:
    """Tokens per tile, warps and stages, for heads of `width` bytes. With many programs on narrow heads, one warp each
    is fastest, since it need not synchronise; wide heads must fit into the shared memory of small GPUs. Measured on an
    H200 with heads of 128 and 256 bytes."""
    tile, warps, stages = (32, 1, 3) if width <= 128 and programs >= 2 * WANTED_PROGRAMS else (64, 4, 2)
    if width >= 1024:
        tile = 32
    return {"TILE": min(tile, block), "num_warps": warps, "num_stages": stages}


def attend_and_write(
    query_BHD: torch.Tensor,
    key_BHD: torch.Tensor,
    value_BHD: torch.Tensor,
    cos_BD: torch.Tensor | None,
    sin_BD: torch.Tensor | None,
    slots_B: torch.Tensor,
    addresses_2: torch.Tensor,
    arrivals: torch.Tensor,
    table_BM: torch.Tensor,
    lengths_B: torch.Tensor,
    block: int,
    scale: float,
    window: int | None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Rotate one new token per row, write its key and value to its slot, and attend over it and the `lengths` - 1
    tokens before it. All tensors and the cache have the same dtype. `arrivals` must be zero, and is again
    afterwards."""
    query_BHD, key_BHD, value_BHD = (_contiguous_heads(x) for x in (query_BHD, key_BHD, value_BHD))
    rows, heads, dim = query_BHD.shape
    kv_heads = key_BHD.shape[1]
    group = heads // kv_heads
    padded, wide = (max(16, triton.next_power_of_2(size)) for size in (group, dim))
    splits = splits_for(rows, kv_heads)
    assert splits == 1 or rows * kv_heads <= len(arrivals)
    out = torch.empty(rows, heads, dim, dtype=query_BHD.dtype, device=query_BHD.device)
    places = rows * kv_heads * splits * padded if splits > 1 else 1
    parts = torch.empty(places * wide, dtype=torch.float32, device=query_BHD.device)
    stats = torch.empty(places * 2, dtype=torch.float32, device=query_BHD.device)
    _attend[(kv_heads, rows, splits)](
        query_BHD, key_BHD, value_BHD, query_BHD if cos_BD is None else cos_BD, query_BHD if sin_BD is None else sin_BD,
        slots_B, addresses_2, table_BM, lengths_B, out, parts, stats, arrivals, query_BHD.stride(0), key_BHD.stride(0),
        value_BHD.stride(0), scale, softcap or 0.0, table_BM.stride(0), 2**30 if window is None else window, splits,
        ROTATE=cos_BD is not None, HK=kv_heads, G=group, GP=padded, D=dim, DP=wide, BLOCK=block, SPLIT=splits > 1,
        CAPPED=softcap is not None, **shape_of(rows * kv_heads, wide * query_BHD.itemsize, block),
    )  # fmt: skip
    return out


def _contiguous_heads(x_BHD: torch.Tensor) -> torch.Tensor:
    """The heads of a row contiguous, as the kernel needs them; they are not in families that rotate part of a head."""
    return x_BHD if x_BHD.stride()[1:] == (x_BHD.shape[-1], 1) else x_BHD.contiguous()
