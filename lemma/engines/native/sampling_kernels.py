"""Triton kernels for sampling: noise, cuts of the support (top-k, top-p, min-p, forbidden ends), and the choice.

Each is tested against plain code (sampler, lemma.engines.sampling). Arithmetic is in float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton import knobs

from lemma.models.kernels import tanh

if TYPE_CHECKING:
    from lemma.engines.native.cuts import Cuts

SAMPLE_BLOCK = 1024
THRESHOLD_BLOCK = 4096
INTERPRETED = tl.constexpr(knobs.runtime.interpret)


@triton.jit
def _fast_log(x):
    """The hardware's logarithm, exact to about seven digits."""
    if INTERPRETED:
        return tl.log(x)
    else:
        binary = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
        return binary * 0.6931471805599453


@triton.jit
def _fast_exp(x):
    """The hardware's exponential; subnormal results become 0."""
    if INTERPRETED:
        return tl.exp(x)
    else:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * 1.4426950408889634], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _may_be_drawn(column, row, POSITION, UNTIL, ENDS, E: tl.constexpr):
    """False for tokens that would end a completion too early."""
    early = tl.load(POSITION + row) < tl.load(UNTIL + row)
    allowed = column >= 0
    for number in tl.static_range(E):
        allowed = allowed & ((column != tl.load(ENDS + row * E + number)) | (early == 0))
    return allowed


@triton.jit
def _in_order(x):
    """Floating-point values as integers in the same order; -0.0 and 0.0 give the same."""
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
    """Over the tokens at or above `least` (as `_in_order`) that may be drawn: their number, or the sum of
    exp(z - top)."""
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
    """The highest threshold from `low` on (as `_in_order`) that keeps at least `wanted` tokens, or `wanted` mass."""
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
    # Masses are relative to the likeliest token that may be drawn: a forbidden end may be far more likely.
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
def _uniform(column, low, high):
    """A hash of each token, as a number in (0, 1)."""
    hashed = _mix(_mix(column.to(tl.uint32) * 0x9E3779B1 + low) ^ high)
    return tl.minimum((hashed.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)


@triton.jit
def _log_of_exponential(uniform):
    """log(-log(1 - u)), the negative of Gumbel noise. For small u the hardware's log is too coarse for the inner one,
    so a series is used."""
    small = 0.25 + uniform * 0.2
    small = uniform * (1.0 + uniform * (0.5 + uniform * (0.33333333 + uniform * small)))
    return _fast_log(tl.where(uniform < 0.0625, small, -_fast_log(1.0 - uniform)))


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
    # Each lane keeps its own running maximum and sum; they are combined at the end.
    tops = tl.full([BLOCK], -1e30, tl.float32)
    totals = tl.zeros([BLOCK], tl.float32)
    bests = tl.full([BLOCK], -float("inf"), tl.float32)
    picks = tl.zeros([BLOCK], tl.int32)
    for start in range(begin, tl.minimum(begin + per_split, columns), BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        x = tl.load(Z + row * columns + column, mask=inside, other=-float("inf")).to(tl.float32)
        z = x
        if CAPPED:
            z = tl.where(inside, tanh(z * inner), -float("inf"))
        z *= inverse
        # One of exp(old top - new top) and exp(z - new top) is always 1.
        higher = z > tops
        less = _fast_exp(-tl.abs(z - tops))
        totals = tl.where(higher, totals * less + 1.0, totals + less)
        tops = tl.where(higher, z, tops)
        value = z - noisy * _log_of_exponential(_uniform(column, low, high))
        better = value > bests
        if CUT:
            kept = (x >= tl.load(FLOOR + row)) & (z >= tl.load(LEAST + row))
            better = better & kept & _may_be_drawn(column, row, POSITION, UNTIL, ENDS, E)
        bests = tl.where(better, value, bests)
        picks = tl.where(better, column, picks)
    top, best = tl.max(tops, 0), tl.max(bests, 0)
    place = row * SPLITS + split
    tl.store(BEST + place, best)
    tl.store(PICK + place, tl.min(tl.where(bests == best, picks, columns - 1), 0))
    tl.store(STATS + 2 * place, top)
    tl.store(STATS + 2 * place + 1, tl.sum(totals * tl.exp(tops - top), 0))


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


def splits_for(rows: int) -> int:
    """The number of splits of the vocabulary: many for few rows, so that they fill the GPU."""
    return 8 if rows >= 128 else 32


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
    """One token per row, the argmax of logits / temperature + noise; its log-probability without noise and cuts; and
    the log of the mass that `cuts` keep.

    `scale` and `cap` are applied to the output of the head (see `lemma.models.logprobs.map_logits`).
    """
    rows, columns = logits_BV.shape
    curve = (scale, 0.0, False) if cap is None else (cap, scale / cap, True)
    device = logits_BV.device
    splits = splits_for(rows)
    best = torch.empty(rows, splits, dtype=torch.float32, device=device)
    pick = torch.empty(rows, splits, dtype=torch.int32, device=device)
    stats = torch.empty(rows, splits, 2, dtype=torch.float32, device=device)
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
            E=count, CAPPED=curve[2], BLOCK=THRESHOLD_BLOCK, num_warps=8,
        )  # fmt: skip
    _sample[(rows, splits)](
        logits_BV, keys_B2, positions_B, inverse_B, noisy_B, best, pick, stats, *limits, columns, *curve[:2],
        CUT=cuts is not None, E=count, CAPPED=curve[2], SPLITS=splits, BLOCK=SAMPLE_BLOCK,
    )  # fmt: skip
    _choose[(rows,)](logits_BV, inverse_B, best, pick, stats, token, logprob, columns, *curve, SPLITS=splits)
    return token, logprob, kept
