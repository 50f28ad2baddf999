"""Triton kernels of the learner's joint products: what stands between one matrix product of a block and the next.

Each is a backend of plain code (blocks, products) and is tested against it. The arithmetic is in float32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from lemma.models.kernels import head_tile, norm_backward, norm_forward

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
    JOINT, COS, SIN, Q, K, V, sign, JOINS: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HEADS: tl.constexpr,
    D: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Queries and keys of a row rotated, values as they are: from JOINT to its parts, or, with JOINS, back."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, HALF)[None, :]
    inside = d < D // 2
    is_query = inside & (head < HQ)
    is_key = inside & (head >= HQ) & (head < HQ + HK)
    is_value = inside & (head >= HQ + HK) & (head < HQ + 2 * HK)
    whole = JOINT + (token * (HQ + 2 * HK) + head) * D + d
    query = Q + (token * HQ + head) * D + d
    key = K + (token * HK + head - HQ) * D + d
    value = V + (token * HK + head - HQ - HK) * D + d
    if JOINS:
        a = _picked(query, key, value, is_query, is_key, is_value)
        b = _picked(query + D // 2, key + D // 2, value + D // 2, is_query, is_key, is_value)
    else:
        a = tl.load(whole, mask=is_query | is_key | is_value, other=0.0)
        b = tl.load(whole + D // 2, mask=is_query | is_key | is_value, other=0.0)
    x, y = a.to(tl.float32), b.to(tl.float32)
    cos = tl.load(COS + token * D + d, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(SIN + token * D + d, mask=inside, other=0.0).to(tl.float32) * sign
    turns = head < HQ + HK
    a = tl.where(turns, x * cos - y * sin, x).to(a.dtype)
    b = tl.where(turns, y * cos + x * sin, y).to(b.dtype)
    if JOINS:
        tl.store(whole, a, mask=is_query | is_key | is_value)
        tl.store(whole + D // 2, b, mask=is_query | is_key | is_value)
    else:
        tl.store(query, a, mask=is_query)
        tl.store(query + D // 2, b, mask=is_query)
        tl.store(key, a, mask=is_key)
        tl.store(key + D // 2, b, mask=is_key)
        tl.store(value, a, mask=is_value)
        tl.store(value + D // 2, b, mask=is_value)


@triton.jit
def _picked(query, key, value, is_query, is_key, is_value):
    q = tl.load(query, mask=is_query, other=0.0)
    k = tl.load(key, mask=is_key, other=0.0)
    v = tl.load(value, mask=is_value, other=0.0)
    return tl.where(is_query, q, tl.where(is_key, k, v))


def _layout(queries: int, keys: int, dim: int) -> dict[str, int]:
    return {"HQ": queries, "HK": keys, "D": dim} | head_tile(queries + 2 * keys, dim)


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
            JOINS=False, **_layout(queries, keys, dim),
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
            JOINS=True, **_layout(queries, keys, dim),
        )  # fmt: skip
        return joint, None, None, None
