"""Triton kernels that draw tokens: noise, cuts of the support (top-k, top-p, min-p, ends that come too early), choice.

Each is tested against plain code (sampler, lemma.engines.sampling). The arithmetic is in float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from lemma.models.kernels import tanh

if TYPE_CHECKING:
    from lemma.engines.native.sampler import Cuts

SAMPLE_BLOCK = 4096
SAMPLE_SPLITS = 8


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _may_be_drawn(column, row, POSITION, UNTIL, ENDS, E: tl.constexpr):
    """False for the tokens that end a completion where it is too early to end."""
    early = tl.load(POSITION + row) < tl.load(UNTIL + row)
    allowed = column >= 0
    for number in tl.static_range(E):
        allowed = allowed & ((column != tl.load(ENDS + row * E + number)) | (early == 0))
    return allowed


@triton.jit
def _in_order(x):
    """A whole number for each value of a type, in the same order; -0.0 and 0.0 have the same."""
    if x.dtype.primitive_bitwidth == 16:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32)
        ordered = tl.where(bits < 0, (bits ^ 0x7FFF) + 1, bits)
    else:
        bits = x.to(tl.int32, bitcast=True)
        ordered = tl.where(bits < 0, (bits ^ 0x7FFFFFFF) + 1, bits)
    return ordered


@triton.jit
def _mass(
    Z, row, columns, least, top, inverse, inner, POSITION, UNTIL, ENDS, COUNTS: tl.constexpr, E: tl.constexpr,
    CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """How many tokens are at least `least` in order and may be drawn, or the sum of exp(z - top) over them."""
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(Z + row * columns + column, mask=column < columns, other=-float("inf"))
        kept = (column < columns) & (_in_order(x) >= least) & _may_be_drawn(column, row, POSITION, UNTIL, ENDS, E)
        z = x.to(tl.float32)
        if CAPPED:
            z = tanh(z * inner)
        part = tl.exp(z * inverse - top)
        if COUNTS:
            part = tl.full([BLOCK], 1.0, tl.float32)
        total += tl.where(kept, part, 0.0)
    return tl.sum(total, 0)


@triton.jit
def _bisect(
    Z, row, columns, low, wanted, top, inverse, inner, POSITION, UNTIL, ENDS, COUNTS: tl.constexpr,
    HIGHEST: tl.constexpr, BITS: tl.constexpr, E: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The highest number from `low` on, in order, at or above which are so many tokens, or so much of their mass."""
    high = tl.full([], HIGHEST, tl.int64)
    for _ in range(BITS):
        middle = low + (high - low) // 2 + (high - low) % 2
        mass = _mass(Z, row, columns, middle, top, inverse, inner, POSITION, UNTIL, ENDS, COUNTS, E, CAPPED, BLOCK)
        low = tl.where(mass >= wanted, middle, low)
        high = tl.where(mass >= wanted, high, middle - 1)
    return low


@triton.jit
def _threshold(
    Z, INVERSE_T, POSITION, UNTIL, ENDS, TOP_K, TOP_P, MIN_P, FLOOR, LEAST, KEPT, columns, factor, inner,
    LOWEST: tl.constexpr, HIGHEST: tl.constexpr, BITS: tl.constexpr, E: tl.constexpr, CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    inverse = tl.load(INVERSE_T + row) * factor
    top_k, top_p, min_p = tl.load(TOP_K + row), tl.load(TOP_P + row), tl.load(MIN_P + row)
    highest = tl.full([BLOCK], -float("inf"), tl.float32)
    drawable = tl.full([BLOCK], -float("inf"), tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        z = tl.load(Z + row * columns + column, mask=column < columns, other=-float("inf")).to(tl.float32)
        if CAPPED:
            z = tl.where(column < columns, tanh(z * inner), -float("inf"))
        z *= inverse
        highest = tl.maximum(highest, z)
        drawable = tl.maximum(
            drawable, tl.where(_may_be_drawn(column, row, POSITION, UNTIL, ENDS, E), z, -float("inf"))
        )
    top, best = tl.max(highest, 0), tl.max(drawable, 0)
    # What may be drawn is weighed against the likeliest of it: an end that comes too early may be likelier by far.
    low = tl.full([], LOWEST, tl.int64)
    if top_k > 0:
        low = _bisect(
            Z, row, columns, low, top_k, best, inverse, inner, POSITION, UNTIL, ENDS, True, HIGHEST, BITS, E, CAPPED,
            BLOCK,
        )  # fmt: skip
    if top_p < 1.0:
        wanted = top_p * _mass(
            Z, row, columns, low, best, inverse, inner, POSITION, UNTIL, ENDS, False, E, CAPPED, BLOCK
        )  # fmt: skip
        low = _bisect(
            Z, row, columns, low, wanted, best, inverse, inner, POSITION, UNTIL, ENDS, False, HIGHEST, BITS, E, CAPPED,
            BLOCK,
        )  # fmt: skip
    least = best + min_p
    floor = tl.full([BLOCK], float("inf"), tl.float32)
    whole, kept = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(Z + row * columns + column, mask=column < columns, other=-float("inf"))
        z = x.to(tl.float32)
        if CAPPED:
            z = tl.where(column < columns, tanh(z * inner), -float("inf"))
        z *= inverse
        stays = (column < columns) & (_in_order(x) >= low)
        floor = tl.minimum(floor, tl.where(stays, x.to(tl.float32), float("inf")))
        stays = stays & (z >= least) & _may_be_drawn(column, row, POSITION, UNTIL, ENDS, E)
        whole += tl.exp(z - top)
        kept += tl.where(stays, tl.exp(z - best), 0.0)
    tl.store(FLOOR + row, tl.min(floor, 0))
    tl.store(LEAST + row, least)
    share = (best - top) + tl.log(tl.sum(kept, 0)) - tl.log(tl.sum(whole, 0))
    cuts = (top_k > 0) | (top_p < 1.0) | (min_p > -float("inf")) | (tl.load(POSITION + row) < tl.load(UNTIL + row))
    tl.store(KEPT + row, tl.where(cuts, tl.minimum(share, 0.0), 0.0))


@triton.jit
def _sample(
    Z, KEYS, POSITION, INVERSE_T, NOISY, BEST, PICK, STATS, FLOOR, LEAST, UNTIL, ENDS, columns, factor, inner,
    CUT: tl.constexpr, E: tl.constexpr, CAPPED: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    inverse = tl.load(INVERSE_T + row) * factor
    noisy = tl.load(NOISY + row)
    low = _mix(tl.load(KEYS + 2 * row).to(tl.uint32) + tl.load(POSITION + row).to(tl.uint32) * 0x9E3779B1)
    high = _mix(tl.load(KEYS + 2 * row + 1).to(tl.uint32) ^ low)
    per_split = tl.cdiv(columns, SPLITS * BLOCK) * BLOCK
    begin = split * per_split
    top = tl.full([], -1e30, tl.float32)
    total = tl.full([], 0.0, tl.float32)
    best = tl.full([], -float("inf"), tl.float32)
    pick = tl.full([], 0, tl.int32)
    for start in range(begin, tl.minimum(begin + per_split, columns), BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        x = tl.load(Z + row * columns + column, mask=inside, other=-1e30).to(tl.float32)
        z = x
        if CAPPED:
            z = tl.where(inside, tanh(z * inner), -1e30)
        z *= inverse
        higher = tl.maximum(top, tl.max(z, 0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(z - higher), 0)
        top = higher
        hashed = _mix(_mix(column.to(tl.uint32) * 0x9E3779B1 + low) ^ high)
        uniform = tl.minimum((hashed.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
        small = uniform * (1.0 + uniform * (0.5 + uniform * 0.33333333))
        exponential = tl.where(uniform < 1e-3, small, -tl.log(1.0 - uniform))
        drawable = inside
        if CUT:
            kept = (x >= tl.load(FLOOR + row)) & (z >= tl.load(LEAST + row))
            drawable = inside & kept & _may_be_drawn(column, row, POSITION, UNTIL, ENDS, E)
        value = tl.where(drawable, z - noisy * tl.log(exponential), -float("inf"))
        here = tl.max(value, 0)
        if here > best:
            pick = start + tl.argmax(value, 0)
            best = here
    place = row * SPLITS + split
    tl.store(BEST + place, best)
    tl.store(PICK + place, pick)
    tl.store(STATS + 2 * place, top)
    tl.store(STATS + 2 * place + 1, total)


@triton.jit
def _choose(
    Z, INVERSE_T, BEST, PICK, STATS, TOKEN, LOGPROB, columns, factor, inner, CAPPED: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, SPLITS)
    token = tl.load(PICK + row * SPLITS + tl.argmax(tl.load(BEST + row * SPLITS + s), 0))
    tops = tl.load(STATS + 2 * (row * SPLITS + s))
    totals = tl.load(STATS + 2 * (row * SPLITS + s) + 1)
    top = tl.max(tops, 0)
    lse = top + tl.log(tl.sum(totals * tl.exp(tops - top), 0))
    z = tl.load(Z + row * columns + token).to(tl.float32)
    if CAPPED:
        z = tanh(z * inner)
    tl.store(TOKEN + row, token.to(tl.int64))
    tl.store(LOGPROB + row, z * (tl.load(INVERSE_T + row) * factor) - lse)


def sample(
    logits_BV: torch.Tensor,
    keys_B2: torch.Tensor,
    positions_B: torch.Tensor,
    inverse_B: torch.Tensor,
    noisy_B: torch.Tensor,
    scale: float = 1.0,
    cap: float | None = None,
    cuts: Cuts | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One token per row, argmax of logits / temperature + noise, its log-probability without the noise and the cuts,
    and the log of the mass that `cuts` keep.

    `scale` and `cap` are what the model does with its head's output (see `lemma.models.logprobs.map_logits`).
    """
    rows, columns = logits_BV.shape
    curve = (scale, 0.0, False) if cap is None else (cap, scale / cap, True)
    device = logits_BV.device
    best = torch.empty(rows, SAMPLE_SPLITS, dtype=torch.float32, device=device)
    pick = torch.empty(rows, SAMPLE_SPLITS, dtype=torch.int32, device=device)
    stats = torch.empty(rows, SAMPLE_SPLITS, 2, dtype=torch.float32, device=device)
    token = torch.empty(rows, dtype=torch.int64, device=device)
    logprob = torch.empty(rows, dtype=torch.float32, device=device)
    kept = torch.zeros(rows, dtype=torch.float32, device=device)
    limits, count = (inverse_B, inverse_B, positions_B, positions_B), 1
    if cuts is not None:
        floor, least = torch.empty_like(logprob), torch.empty_like(logprob)
        limits, count = (floor, least, cuts.until_B, cuts.ends_BE), cuts.ends_BE.shape[1]
        bits = 8 * logits_BV.itemsize
        _threshold[(rows,)](
            logits_BV, inverse_B, positions_B, cuts.until_B, cuts.ends_BE, cuts.top_k_B, cuts.top_p_B, cuts.min_p_B,
            floor, least, kept, columns, *curve[:2], LOWEST=-(2 ** (bits - 1)), HIGHEST=2 ** (bits - 1) - 1, BITS=bits,
            E=count, CAPPED=curve[2], BLOCK=SAMPLE_BLOCK, num_warps=8,
        )  # fmt: skip
    _sample[(rows, SAMPLE_SPLITS)](
        logits_BV, keys_B2, positions_B, inverse_B, noisy_B, best, pick, stats, *limits, columns, *curve[:2],
        CUT=cuts is not None, E=count, CAPPED=curve[2], SPLITS=SAMPLE_SPLITS, BLOCK=SAMPLE_BLOCK,
    )  # fmt: skip
    _choose[(rows,)](logits_BV, inverse_B, best, pick, stats, token, logprob, columns, *curve, SPLITS=SAMPLE_SPLITS)
    return token, logprob, kept
