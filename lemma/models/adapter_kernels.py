"""Triton kernels for what LoRA adapters add to a product: in place, onto a residual stream, or on the way into a gate.

Each stands for plain code in lemma.models.adapters and is tested against it. Imported only where a GPU is, or where
TRITON_INTERPRET=1 runs the kernels on a CPU, in the tests.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

ROWS, COLUMNS = 32, 64
# Bytes of a tile of both factors: every GPU has twice as much shared memory.
TILE_BYTES = 49152


def largest_rank(dtype: torch.dtype) -> int:
    """The largest power of two whose tiles fit."""
    return 1 << ((TILE_BYTES // ((ROWS + COLUMNS) * dtype.itemsize)).bit_length() - 1)


@triton.jit
def _added(JOINT, UP, row, inside, place, column, inner, stride, scale, RANK: tl.constexpr, R: tl.constexpr):
    """What one adapter adds to a tile: `place` are the columns of its second factor, `inner` where its inner values
    begin in a row."""
    r = tl.arange(0, R)
    mask = inside[:, None] & (r[None, :] < RANK)
    x = tl.load(JOINT + row[:, None] * stride + inner + r[None, :], mask=mask, other=0.0)
    up = tl.load(UP + place[None, :] * RANK + r[:, None], mask=r[:, None] < RANK, other=0.0)
    own = tl.load(JOINT + row[:, None] * stride + column[None, :], mask=inside[:, None], other=0.0)
    return own.to(tl.float32) + tl.dot(x, up, input_precision="ieee") * scale


@triton.jit(do_not_specialize=["rows"])
def _adapt(
    JOINT, TARGET, A, B, C, rows, stride, target_stride, first, second, wide, scale, ADDS: tl.constexpr,
    RANK: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The three layers' columns end at `first`, `second` and `wide`; one without columns plays no part."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    begin = tl.program_id(1) * COLUMNS
    column = begin + tl.arange(0, COLUMNS)
    if begin < first:
        y = _added(JOINT, A, row, inside, column, column, wide, stride, scale, RANK, R)
    elif begin < second:
        y = _added(JOINT, B, row, inside, column - first, column, wide + RANK, stride, scale, RANK, R)
    else:
        y = _added(JOINT, C, row, inside, column - second, column, wide + 2 * RANK, stride, scale, RANK, R)
    if ADDS:
        there = TARGET + row[:, None] * target_stride + column[None, :]
        y = y + tl.load(there, mask=inside[:, None], other=0.0).to(tl.float32)
        tl.store(there, y.to(TARGET.dtype.element_ty), mask=inside[:, None])
    else:
        there = JOINT + row[:, None] * stride + column[None, :]
        tl.store(there, y.to(JOINT.dtype.element_ty), mask=inside[:, None])


@triton.jit(do_not_specialize=["rows"])
def _gate_adapted(
    JOINT, A, B, Y, rows, stride, columns, scale, RANK: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    place = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    wide = 2 * columns
    gate = _added(JOINT, A, row, inside, place, place, wide, stride, scale, RANK, R)
    up = _added(JOINT, B, row, inside, place, columns + place, wide + RANK, stride, scale, RANK, R)
    # Rounded as the two layers would give them.
    gate = gate.to(JOINT.dtype.element_ty).to(tl.float32)
    up = up.to(JOINT.dtype.element_ty).to(tl.float32)
    y = (gate * tl.sigmoid(gate) * up).to(Y.dtype.element_ty)
    tl.store(Y + row[:, None] * columns + place[None, :], y, mask=inside[:, None])


def adapt_(
    joint_TX: torch.Tensor, ups: Sequence[torch.Tensor], rank: int, scale: float, target_TO: torch.Tensor | None
) -> None:
    """Add to the first columns of `joint_TX` what adapters make of its last ones; with a target, add both to that."""
    rows, ends = len(joint_TX), [0]
    for up in ups:
        ends.append(ends[-1] + len(up))
    first, wide = ends[1], ends[-1]
    second = ends[2] if len(ups) > 1 else wide
    target = joint_TX if target_TO is None else target_TO
    three = [*ups, ups[0], ups[0]][:3]
    _adapt[(triton.cdiv(rows, ROWS), wide // COLUMNS)](
        joint_TX, target, *three, rows, joint_TX.stride(0), target.stride(0), first, second, wide, scale,
        ADDS=target_TO is not None, RANK=rank, R=max(16, triton.next_power_of_2(rank)), ROWS=ROWS, COLUMNS=COLUMNS,
    )  # fmt: skip


def gate_adapted(joint_TX: torch.Tensor, ups: Sequence[torch.Tensor], rank: int, scale: float) -> torch.Tensor:
    """silu(gate) * up, where gate and up lie side by side before their adapters, and the inner values after them."""
    rows, columns = len(joint_TX), len(ups[0])
    y = joint_TX.new_empty(rows, columns)
    _gate_adapted[(triton.cdiv(rows, ROWS), columns // COLUMNS)](
        joint_TX, *ups, y, rows, joint_TX.stride(0), columns, scale,
        RANK=rank, R=max(16, triton.next_power_of_2(rank)), ROWS=ROWS, COLUMNS=COLUMNS,
    )  # fmt: skip
    return y
