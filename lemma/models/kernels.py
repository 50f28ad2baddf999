"""Triton kernels for the row work that frameworks leave unfused: RMS norm, the gated feed-forward, softmax over logits.

Each is a backend of a plain function elsewhere in this package and is tested against it. The arithmetic is in float32.
Imported only where a GPU is (or where TRITON_INTERPRET=1 runs the kernels on a CPU, in the tests).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

# Programs of the backward norm; each sums the weight's gradient over its own rows.
NORM_PROGRAMS = 2048
SOFTMAX_BLOCK = 4096
GATE_BLOCK = 1024


# Rows differ from pack to pack: a kernel for each kind of number would be compiled in the middle of a run.
@triton.jit(do_not_specialize=["rows"])
def _norm_forward(
    X, B, W, S, Y, RSTD, rows, columns, eps, ADDS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Rows of Y = W * X / rms(X); with ADDS, of S = X + B in place of X."""
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    place = row[:, None] * columns + column[None, :]
    x = tl.load(X + place, mask=inside, other=0.0)
    if ADDS:
        x = (x.to(tl.float32) + tl.load(B + place, mask=inside, other=0.0).to(tl.float32)).to(X.dtype.element_ty)
        tl.store(S + place, x, mask=inside)
    x = x.to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 1) / columns + eps)
    w = tl.load(W + column, mask=column < columns, other=0.0).to(tl.float32)
    normal = (x * rstd[:, None]).to(Y.dtype.element_ty).to(tl.float32)
    tl.store(Y + place, (w[None, :] * normal).to(Y.dtype.element_ty), mask=inside)
    tl.store(RSTD + row, rstd, mask=row < rows)


@triton.jit(do_not_specialize=["rows", "per_program"])
def _norm_backward(
    DY, DS, X, W, RSTD, DX, DW, rows, columns, per_program, ADDS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    w = tl.load(W + column, mask=column < columns, other=0.0).to(tl.float32)
    dw = tl.zeros([TILE, BLOCK], tl.float32)
    first = program * per_program
    last = tl.minimum(first + per_program, rows)
    for start in range(first, last, TILE):
        row = start + tl.arange(0, TILE)
        inside = (row < last)[:, None] & (column < columns)[None, :]
        place = row[:, None] * columns + column[None, :]
        x = tl.load(X + place, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(DY + place, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(RSTD + row, mask=row < last, other=0.0)[:, None]
        normal = x * rstd
        dw += dy * normal
        d = dy * w[None, :]
        dx = rstd * (d - normal * (tl.sum(d * normal, 1) / columns)[:, None])
        if ADDS:
            dx = tl.load(DS + place, mask=inside, other=0.0).to(tl.float32) + dx
        tl.store(DX + place, dx.to(DX.dtype.element_ty), mask=inside)
    tl.store(DW + program * columns + column, tl.sum(dw, 0), mask=column < columns)


def _tile(columns: int) -> dict[str, int]:
    """Rows at a time and warps. Heads are narrow: one at a time would leave a program idle."""
    block = triton.next_power_of_2(columns)
    return {"TILE": max(1, 1024 // block), "BLOCK": block, "num_warps": 8 if block >= 8192 else 4}


def norm_forward(
    x: torch.Tensor, branch: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The rows with a branch added, their RMS norm, and 1 / rms of each."""
    rows, columns = x.shape
    total = x if branch is None else torch.empty_like(x)
    y, rstd = torch.empty_like(x), torch.empty(rows, dtype=torch.float32, device=x.device)
    tile = _tile(columns)
    _norm_forward[(triton.cdiv(rows, tile["TILE"]),)](
        x, x if branch is None else branch, weight, total, y, rstd, rows, columns, eps, ADDS=branch is not None, **tile
    )
    return total, y, rstd


def norm_backward(
    dy: torch.Tensor, d_sum: torch.Tensor | None, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of the rows and of the weight of an RMS norm; `d_sum` is what else pulls on the rows."""
    rows, columns = x.shape
    tile = _tile(columns)
    programs = min(triton.cdiv(rows, tile["TILE"]), NORM_PROGRAMS)
    per_program = triton.cdiv(triton.cdiv(rows, programs), tile["TILE"]) * tile["TILE"]
    dx, dw = torch.empty_like(x), torch.empty(programs, columns, dtype=torch.float32, device=x.device)
    _norm_backward[(programs,)](
        dy, dy if d_sum is None else d_sum, x, weight, rstd, dx, dw, rows, columns, per_program,
        ADDS=d_sum is not None, **tile,
    )  # fmt: skip
    return dx, dw.sum(0).to(weight.dtype)


class FusedRmsNorm(torch.autograd.Function):
    """y = weight * x / rms(x), with the rounding of transformers: normalised in float32, cast, then scaled."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        _, y, rstd = norm_forward(flat, None, weight, eps)
        ctx.save_for_backward(flat, weight, rstd)
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        flat, weight, rstd = ctx.saved_tensors
        dx, dw = norm_backward(grads[0].reshape(flat.shape).contiguous(), None, flat, weight, rstd)
        return dx.view(grads[0].shape), dw, None


@triton.jit
def _gate_forward(G, U, Y, columns, g_stride, u_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    g = tl.load(G + row * g_stride + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(U + row * u_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(Y + row * columns + column, (g * tl.sigmoid(g) * u).to(Y.dtype.element_ty), mask=inside)


@triton.jit
def _gate_backward(DY, G, U, DG, DU, count, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    dy = tl.load(DY + place, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(G + place, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(U + place, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(g)
    tl.store(DG + place, (dy * u * (s + g * s * (1.0 - s))).to(DG.dtype.element_ty), mask=inside)
    tl.store(DU + place, (dy * g * s).to(DU.dtype.element_ty), mask=inside)


class FusedGate(torch.autograd.Function):
    """silu(gate) * up. The rows of both may be parts of longer ones."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        columns = gate.shape[-1]
        flat_gate, flat_up = gate.reshape(-1, columns), up.reshape(-1, columns)
        y = torch.empty(flat_gate.shape, dtype=gate.dtype, device=gate.device)
        _gate_forward[(len(flat_gate), triton.cdiv(columns, GATE_BLOCK))](
            flat_gate, flat_up, y, columns, flat_gate.stride(0), flat_up.stride(0), BLOCK=GATE_BLOCK
        )
        ctx.save_for_backward(gate, up)
        return y.view(gate.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        gate, up = (x.contiguous() for x in ctx.saved_tensors)
        dy = grads[0].contiguous()
        d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
        grid = (triton.cdiv(gate.numel(), GATE_BLOCK),)
        _gate_backward[grid](dy, gate, up, d_gate, d_up, gate.numel(), BLOCK=GATE_BLOCK)
        return d_gate, d_up


@triton.jit
def _rotation(
    X, COS, SIN, Y, stride_token, stride_head, sign, H: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, HALF)[None, :]
    inside = (head < H) & (d < D // 2)
    cos = tl.load(COS + token * D + d, mask=d < D // 2, other=0.0).to(tl.float32)
    sin = tl.load(SIN + token * D + d, mask=d < D // 2, other=0.0).to(tl.float32) * sign
    source = X + token * stride_token + head * stride_head + d
    a = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + D // 2, mask=inside, other=0.0).to(tl.float32)
    target = Y + (token * H + head) * D + d
    tl.store(target, (a * cos - b * sin).to(Y.dtype.element_ty), mask=inside)
    tl.store(target + D // 2, (b * cos + a * sin).to(Y.dtype.element_ty), mask=inside)


def head_tile(heads: int, dim: int) -> dict[str, int]:
    """All heads of a token at a time, by halves."""
    tile = {"HEADS": triton.next_power_of_2(heads), "HALF": triton.next_power_of_2(dim // 2)}
    return tile | {"num_warps": 1 if tile["HEADS"] * tile["HALF"] <= 1024 else 4}


class FusedRotation(torch.autograd.Function):
    """Rotary embedding of (T, H, D); its gradient is the rotation by the opposite angle."""

    @staticmethod
    def forward(ctx: Any, x_THD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos_TD, sin_TD)
        return FusedRotation._turn(x_THD, cos_TD, sin_TD, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        cos_TD, sin_TD = ctx.saved_tensors
        return FusedRotation._turn(grads[0], cos_TD, sin_TD, -1.0), None, None

    @staticmethod
    def _turn(x_THD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor, sign: float) -> torch.Tensor:
        tokens, heads, dim = x_THD.shape
        x_THD = x_THD if x_THD.stride(-1) == 1 else x_THD.contiguous()
        y = torch.empty(tokens, heads, dim, dtype=x_THD.dtype, device=x_THD.device)
        _rotation[(tokens,)](
            x_THD, cos_TD.contiguous(), sin_TD.contiguous(), y, x_THD.stride(0), x_THD.stride(1), sign,
            H=heads, D=dim, **head_tile(heads, dim),
        )  # fmt: skip
        return y


@triton.jit
def tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _softmax_stats(
    Z, TARGET, LOGPROB, LSE, ENTROPY, columns, inverse_divisor, inner, CAPPED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    base = Z + row * columns
    top = tl.full([], -float("inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    weighted = tl.full([], 0.0, tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        z = tl.load(base + column, mask=inside, other=-float("inf")).to(tl.float32)
        if CAPPED:
            z = tl.where(inside, tanh(z * inner), -float("inf"))
        z *= inverse_divisor
        higher = tl.maximum(top, tl.max(z, 0))
        shrink = tl.exp(top - higher)
        e = tl.exp(z - higher)
        total = total * shrink + tl.sum(e, 0)
        weighted = weighted * shrink + tl.sum(e * tl.where(inside, z, 0.0), 0)
        top = higher
    lse = top + tl.log(total)
    picked = tl.load(base + tl.load(TARGET + row)).to(tl.float32)
    if CAPPED:
        picked = tanh(picked * inner)
    tl.store(LOGPROB + row, picked * inverse_divisor - lse)
    tl.store(LSE + row, lse)
    tl.store(ENTROPY + row, lse - weighted / total)


def softmax_stats(
    logits_NV: torch.Tensor, targets_N: torch.Tensor, divisor: float, inner: float | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probability of the target, log-sum-exp and entropy of each row, in one pass over the logits.

    `divisor` and `inner` are those of `lemma.models.logprobs.Curve`.
    """
    rows, columns = logits_NV.shape
    logprobs, lse, entropies = (torch.empty(rows, dtype=torch.float32, device=logits_NV.device) for _ in range(3))
    _softmax_stats[(rows,)](
        logits_NV, targets_N, logprobs, lse, entropies, columns, 1.0 / divisor, inner or 0.0,
        CAPPED=inner is not None, BLOCK=SOFTMAX_BLOCK,
    )  # fmt: skip
    return logprobs, lse, entropies


@triton.jit
def _softmax_grad(
    Z, TARGET, LSE, ENTROPY, G_LOGPROB, G_ENTROPY, columns, inverse_divisor, inner, HAS_ENTROPY: tl.constexpr,
    CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    place = Z + row * columns + column
    z = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    if CAPPED:
        z = tanh(z * inner)
    logp = z * inverse_divisor - tl.load(LSE + row)
    p = tl.exp(logp)
    g = tl.load(G_LOGPROB + row)
    d = g * (tl.where(column == tl.load(TARGET + row), 1.0, 0.0) - p)
    if HAS_ENTROPY:
        d -= tl.load(G_ENTROPY + row) * p * (logp + tl.load(ENTROPY + row))
    if CAPPED:
        d *= inner * (1.0 - z * z)
    tl.store(place, (d * inverse_divisor).to(Z.dtype.element_ty), mask=inside)


def softmax_grad_(
    logits_NV: torch.Tensor,
    targets_N: torch.Tensor,
    divisor: float,
    inner: float | None,
    lse_N: torch.Tensor,
    entropies_N: torch.Tensor,
    g_logprobs_N: torch.Tensor,
    g_entropy_N: torch.Tensor | None,
) -> torch.Tensor:
    """Replace the logits by the gradient of the loss with respect to them."""
    rows, columns = logits_NV.shape
    g_logprobs = g_logprobs_N.float().contiguous()
    g_entropy = g_logprobs if g_entropy_N is None else g_entropy_N.float().contiguous()
    _softmax_grad[(rows, triton.cdiv(columns, SOFTMAX_BLOCK))](
        logits_NV, targets_N, lse_N.contiguous(), entropies_N.contiguous(), g_logprobs, g_entropy, columns,
        1.0 / divisor, inner or 0.0, HAS_ENTROPY=g_entropy_N is not None, CAPPED=inner is not None, BLOCK=SOFTMAX_BLOCK,
    )  # fmt: skip
    return logits_NV
