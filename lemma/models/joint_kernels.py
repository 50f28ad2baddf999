"""Triton kernels of the learner's joint products: what stands between one matrix product of a block and the next.

Each is a backend of plain code in this room (blocks, products) and is tested against it. The arithmetic is in float32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from lemma.models.kernels import norm_backward, norm_forward

GATE_BLOCK = 1024


class FusedAddNorm(torch.autograd.Function):
    """The sum x + branch, and its RMS norm; without a branch x itself, so that both gradients are added in one pass."""

    @staticmethod
    def forward(
        ctx: Any, x_TH: torch.Tensor, branch_TH: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        branch_TH = None if branch_TH is None else branch_TH.contiguous()
        total, y, rstd = norm_forward(x_TH.contiguous(), branch_TH, weight, eps)
        ctx.save_for_backward(total, weight, rstd)
        ctx.adds = branch_TH is not None
        return total.view_as(total) if branch_TH is None else total, y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        total, weight, rstd = ctx.saved_tensors
        d_sum, dy = (grad.contiguous() for grad in grads)
        dx, dw = norm_backward(dy, d_sum, total, weight, rstd)
        return dx, dx if ctx.adds else None, dw, None


@triton.jit
def _joint_gate_backward(DY, GU, D_GU, Y, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    place = row * 2 * columns + column
    dy = tl.load(DY + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(GU + place, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(GU + place + columns, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(g)
    tl.store(D_GU + place, (dy * u * (s + g * s * (1.0 - s))).to(D_GU.dtype.element_ty), mask=inside)
    tl.store(D_GU + place + columns, (dy * g * s).to(D_GU.dtype.element_ty), mask=inside)
    tl.store(Y + row * columns + column, (g * s * u).to(Y.dtype.element_ty), mask=inside)


def joint_gate_backward(grad_TF: torch.Tensor, joint_T2F: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of gate and up side by side, and silu(gate) * up, in one pass."""
    rows, columns = grad_TF.shape
    d_joint, inner = torch.empty_like(joint_T2F), torch.empty_like(grad_TF)
    grid = (rows, triton.cdiv(columns, GATE_BLOCK))
    _joint_gate_backward[grid](grad_TF.contiguous(), joint_T2F, d_joint, inner, columns, BLOCK=GATE_BLOCK)
    return d_joint, inner


@triton.jit
def _rotate_parts(
    JOINT, COS, SIN, Q, K, V, sign, JOINS: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """Queries and keys of a row rotated, values as they are: from JOINT to its parts, or, with JOINS, back."""
    token = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, HALF)
    inside = d < D // 2
    cos = tl.load(COS + token * D + d, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(SIN + token * D + d, mask=inside, other=0.0).to(tl.float32) * sign
    for head in range(0, HQ + 2 * HK):
        whole = JOINT + (token * (HQ + 2 * HK) + head) * D + d
        if head < HQ:
            part = Q + (token * HQ + head) * D + d
        elif head < HQ + HK:
            part = K + (token * HK + head - HQ) * D + d
        else:
            part = V + (token * HK + head - HQ - HK) * D + d
        source, target = (part, whole) if JOINS else (whole, part)
        a = tl.load(source, mask=inside, other=0.0)
        b = tl.load(source + D // 2, mask=inside, other=0.0)
        if head < HQ + HK:
            x, y = a.to(tl.float32), b.to(tl.float32)
            a, b = (x * cos - y * sin).to(a.dtype), (y * cos + x * sin).to(b.dtype)
        tl.store(target, a, mask=inside)
        tl.store(target + D // 2, b, mask=inside)


class FusedSplit(torch.autograd.Function):
    """Queries, keys and values of a joint product (T, heads * D), queries and keys rotated."""

    @staticmethod
    def forward(
        ctx: Any, joint: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor, heads: tuple[int, int]
    ) -> tuple[torch.Tensor, ...]:
        tokens, (queries, keys) = len(joint), heads
        dim = joint.shape[-1] // (queries + 2 * keys)
        cos, sin = cos_TD.contiguous(), sin_TD.contiguous()
        parts = [joint.new_empty(tokens, count, dim) for count in (queries, keys, keys)]
        _rotate_parts[(tokens,)](
            joint.contiguous(), cos, sin, *parts, 1.0,
            JOINS=False, HQ=queries, HK=keys, D=dim, HALF=triton.next_power_of_2(dim // 2), num_warps=1,
        )  # fmt: skip
        ctx.save_for_backward(cos, sin)
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        cos, sin = ctx.saved_tensors
        parts = [grad.contiguous() for grad in grads]
        tokens, queries, dim = parts[0].shape
        keys = parts[1].shape[1]
        joint = parts[0].new_empty(tokens, (queries + 2 * keys) * dim)
        _rotate_parts[(tokens,)](
            joint, cos, sin, *parts, -1.0,
            JOINS=True, HQ=queries, HK=keys, D=dim, HALF=triton.next_power_of_2(dim // 2), num_warps=1,
        )  # fmt: skip
        return joint, None, None, None
