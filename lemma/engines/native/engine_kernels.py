"""Triton kernels of decoding: rotary embedding with the cache write, attention over blocks.

Each is a backend of plain code in `attention.py` and `sampler.py` and is tested against it. Arithmetic in float32.
Where keys and values of a layer lie is read from the device (`places_2`, see `Cache`), so that a captured graph stays
valid when the cache moves.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lemma.models.kernels import tanh

# Enough programs to fill a large GPU; long contexts are split when the batch alone does not give as many.
WANTED_PROGRAMS = 528
MAX_SPLITS = 32


@triton.jit
def _at(PLACES, which, LIKE):
    """A pointer that is read from memory. The compiler cannot see that it is aligned, so it is told."""
    place = tl.load(PLACES + which).to(tl.pointer_type(LIKE.dtype.element_ty))
    return tl.multiple_of(place, 16)


@triton.jit
def _rotate_and_write(
    Q, K, V, COS, SIN, SLOT, Q_OUT, PLACES, q_stride, k_stride, v_stride, ROTATE: tl.constexpr,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, HALF)
    inside = d < D // 2
    slot = tl.load(SLOT + token)
    if head < HQ:
        source, target = Q + token * q_stride + head * D, Q_OUT + (token * HQ + head) * D
    elif head < HQ + HK:
        source, target = K + token * k_stride + (head - HQ) * D, _at(PLACES, 0, Q) + (slot * HK + head - HQ) * D
    else:
        source = V + token * v_stride + (head - HQ - HK) * D
        target = _at(PLACES, 1, Q) + (slot * HK + head - HQ - HK) * D
    first = tl.load(source + d, mask=inside, other=0.0)
    second = tl.load(source + D // 2 + d, mask=inside, other=0.0)
    if ROTATE and head < HQ + HK:
        cos = tl.load(COS + token * D + d, mask=inside, other=0.0).to(tl.float32)
        sin = tl.load(SIN + token * D + d, mask=inside, other=0.0).to(tl.float32)
        a, b = first.to(tl.float32), second.to(tl.float32)
        first = (a * cos - b * sin).to(first.dtype)
        second = (b * cos + a * sin).to(second.dtype)
    tl.store(target + d, first, mask=inside)
    tl.store(target + D // 2 + d, second, mask=inside)


def rotate_and_write(
    query_BHD: torch.Tensor,
    key_BHD: torch.Tensor,
    value_BHD: torch.Tensor,
    cos_BD: torch.Tensor | None,
    sin_BD: torch.Tensor | None,
    slots_B: torch.Tensor,
    places_2: torch.Tensor,
) -> torch.Tensor:
    """Rotate queries and keys, put keys and values into their slots; the rotated queries. All tensors and the cache
    have the same type."""
    query_BHD, key_BHD, value_BHD = (_side_by_side(x) for x in (query_BHD, key_BHD, value_BHD))
    rows, heads, dim = query_BHD.shape
    kv_heads = key_BHD.shape[1]
    out = torch.empty(rows, heads, dim, dtype=query_BHD.dtype, device=query_BHD.device)
    _rotate_and_write[(rows, heads + 2 * kv_heads)](
        query_BHD, key_BHD, value_BHD, query_BHD if cos_BD is None else cos_BD, query_BHD if sin_BD is None else sin_BD,
        slots_B, out, places_2, query_BHD.stride(0), key_BHD.stride(0), value_BHD.stride(0),
        ROTATE=cos_BD is not None, HQ=heads, HK=kv_heads, D=dim, HALF=triton.next_power_of_2(dim // 2), num_warps=1,
    )  # fmt: skip
    return out


def _side_by_side(x_BHD: torch.Tensor) -> torch.Tensor:
    """The heads of a row side by side, as the kernel reads them; families that rotate a part of a head lay them out
    otherwise."""
    return x_BHD if x_BHD.stride()[1:] == (x_BHD.shape[-1], 1) else x_BHD.contiguous()


@triton.jit
def _decode_attention(
    Q, PLACES, TABLE, LENGTH, OUT, PART, STATS, scale, cap, table_stride, window, splits, HK: tl.constexpr,
    G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr,
    CAPPED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(LENGTH + row)
    first_token = tl.maximum(length - window, 0)
    blocks = tl.cdiv(length, BLOCK)
    first_block = first_token // BLOCK
    per_split = tl.cdiv(blocks - first_block, splits)
    begin = first_block + split * per_split
    end = tl.minimum(begin + per_split, blocks)
    g = tl.arange(0, GP)
    d = tl.arange(0, DP)
    n = tl.arange(0, BLOCK)
    K, V = _at(PLACES, 0, Q), _at(PLACES, 1, Q)
    q_mask = (g[:, None] < G) & (d[None, :] < D)
    q = tl.load(Q + (row * HK + head) * G * D + g[:, None] * D + d[None, :], mask=q_mask, other=0.0)
    top = tl.full([GP], -1e30, tl.float32)
    total = tl.zeros([GP], tl.float32)
    acc = tl.zeros([GP, DP], tl.float32)
    for number in range(begin, end):
        block = tl.load(TABLE + row * table_stride + number).to(tl.int64)
        place = ((block * BLOCK + n) * HK + head) * D
        token = number * BLOCK + n
        visible = (token < length) & (token >= first_token)
        k = tl.load(K + place[None, :] + d[:, None], mask=visible[None, :] & (d[:, None] < D), other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        if CAPPED:
            scores = cap * tanh(scores / cap)
        scores = tl.where(visible[None, :], scores, -1e30)
        higher = tl.maximum(top, tl.max(scores, 1))
        p = tl.exp(scores - higher[:, None])
        shrink = tl.exp(top - higher)
        total = total * shrink + tl.sum(p, 1)
        v = tl.load(V + place[:, None] + d[None, :], mask=visible[:, None] & (d[None, :] < D), other=0.0)
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        top = higher
    if SPLIT:
        base = (row * HK + head) * splits + split
        tl.store(PART + base * GP * DP + g[:, None] * DP + d[None, :], acc)
        tl.store(STATS + base * 2 * GP + g, top)
        tl.store(STATS + base * 2 * GP + GP + g, total)
    else:
        out = (acc / total[:, None]).to(OUT.dtype.element_ty)
        tl.store(OUT + (row * HK + head) * G * D + g[:, None] * D + d[None, :], out, mask=q_mask)


@triton.jit
def _combine_splits(PART, STATS, OUT, splits, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    g = tl.arange(0, GP)
    d = tl.arange(0, DP)
    top = tl.full([GP], -1e30, tl.float32)
    total = tl.zeros([GP], tl.float32)
    acc = tl.zeros([GP, DP], tl.float32)
    for split in range(0, splits):
        base = place * splits + split
        part = tl.load(PART + base * GP * DP + g[:, None] * DP + d[None, :])
        its_top = tl.load(STATS + base * 2 * GP + g)
        its_total = tl.load(STATS + base * 2 * GP + GP + g)
        higher = tl.maximum(top, its_top)
        mine, its = tl.exp(top - higher), tl.exp(its_top - higher)
        total = total * mine + its_total * its
        acc = acc * mine[:, None] + part * its[:, None]
        top = higher
    out = (acc / total[:, None]).to(OUT.dtype.element_ty)
    mask = (g[:, None] < G) & (d[None, :] < D)
    tl.store(OUT + place * G * D + g[:, None] * D + d[None, :], out, mask=mask)


def splits_for(rows: int, kv_heads: int) -> int:
    """Into how many parts a context is cut so that a small batch still fills the GPU."""
    return max(1, min(MAX_SPLITS, WANTED_PROGRAMS // (rows * kv_heads)))


def decode_attention(
    query_BHD: torch.Tensor,
    places_2: torch.Tensor,
    kv_heads: int,
    table_BM: torch.Tensor,
    lengths_B: torch.Tensor,
    block: int,
    scale: float,
    window: int | None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attention of one new token per row over the first `lengths` tokens of its blocks, in a cache of its own type."""
    rows, heads, dim = query_BHD.shape
    group = heads // kv_heads
    padded, wide = max(16, triton.next_power_of_2(group)), triton.next_power_of_2(dim)
    splits = splits_for(rows, kv_heads)
    out = torch.empty_like(query_BHD)
    places = rows * kv_heads * splits * padded if splits > 1 else 1
    parts = torch.empty(places * wide, dtype=torch.float32, device=query_BHD.device)
    stats = torch.empty(places * 2, dtype=torch.float32, device=query_BHD.device)
    _decode_attention[(rows, kv_heads, splits)](
        query_BHD, places_2, table_BM, lengths_B, out, parts, stats, scale, softcap or 0.0, table_BM.stride(0),
        2**30 if window is None else window, splits, HK=kv_heads, G=group, GP=padded, D=dim, DP=wide, BLOCK=block,
        SPLIT=splits > 1, CAPPED=softcap is not None, num_warps=4, num_stages=2,
    )  # fmt: skip
    if splits > 1:
        _combine_splits[(rows * kv_heads,)](parts, stats, out, splits, G=group, GP=padded, D=dim, DP=wide)
    return out
