"""Log-probabilities and entropies of chosen tokens, from hidden states, without ever holding all logits.

The one function for learner, engine and reference. Logits exist for one chunk of rows at a time, in the forward pass
and again in the backward pass, unless a GPU has room to keep them. `fused` kernels (lemma.models.kernels) do the row
work on a GPU; they are tested against the plain code here.

Some families scale or cap what their head puts out: x becomes scale * x, or cap * tanh(scale * x / cap).

Shapes: N rows, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from lemma.models.joint_products import add_product_, sink_of
from lemma.models.memory import CHUNK_BYTES, HOST_CHUNK_BYTES

# Share of a GPU's memory that stays free where logits are kept for the backward pass.
MARGIN = 0.15
# A kernel is compiled once more for addresses that are not multiples of 16 bytes: chunks begin at such multiples.
ALIGNED_ROWS = 16


class Curve(NamedTuple):
    """From the head's output to the exponents of the softmax: x / divisor, or tanh(inner * x) / divisor."""

    divisor: float
    inner: float | None = None


def map_logits(logits: torch.Tensor, scale: float = 1.0, cap: float | None = None) -> torch.Tensor:
    """What a model means by its head's output, in at least float32. A plain model's logits are passed through."""
    if scale == 1.0 and cap is None:
        return logits
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return wide * scale if cap is None else torch.tanh(wide * (scale / cap)) * cap


def token_logprobs(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_N: torch.Tensor,
    *,
    temperature: float = 1.0,
    bias_V: torch.Tensor | None = None,
    scale: float = 1.0,
    cap: float | None = None,
    entropy: bool = False,
    chunk: int | None = None,
    fused: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probability of each target under softmax(hidden @ weight.T / temperature), and the entropy if asked.

    With `scale` and `cap` the logits are those of `map_logits`, before the temperature divides them.
    Both come in float32 (float64 where the hidden states are) and are differentiable in hidden and weight.
    """
    rows = chunk or rows_at_a_time(len(weight_VH), hidden_NH.is_cuda)
    use_fused = hidden_NH.is_cuda and hidden_NH.dtype != torch.float64 if fused is None else fused
    curve = Curve(float(temperature) / scale) if cap is None else Curve(float(temperature) / cap, scale / cap)
    # `forward` cannot ask: no gradient is ever enabled inside it, and its inputs need one under `no_grad` too.
    may_keep = use_fused and torch.is_grad_enabled()
    logprobs, entropies = _ChunkedLogprobs.apply(
        hidden_NH, weight_VH, bias_V, targets_N, curve, rows, entropy, use_fused, may_keep
    )
    return logprobs, entropies if entropy else None


def rows_at_a_time(vocabulary: int, on_gpu: bool) -> int:
    """Rows of logits that are held in float32 at a time."""
    rows = max(1, (CHUNK_BYTES if on_gpu else HOST_CHUNK_BYTES) // (4 * vocabulary))
    return rows - rows % ALIGNED_ROWS if on_gpu and rows > ALIGNED_ROWS else rows


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_N: torch.Tensor,
        curve: Curve,
        rows: int,
        entropy: bool,
        fused: bool,
        may_keep: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        exact = torch.float64 if hidden_NH.dtype == torch.float64 else torch.float32
        count = hidden_NH.shape[0]
        logprobs, lse, entropies = (torch.empty(count, dtype=exact, device=hidden_NH.device) for _ in range(3))
        stats = _fused_stats if fused else _plain_stats
        keeps = may_keep and any(ctx.needs_input_grad[:3]) and _has_room(count * len(weight_VH) * hidden_NH.itemsize)
        ctx.kept = [] if keeps else None
        for start in range(0, count, rows):
            part = slice(start, start + rows)
            logits = _logits(hidden_NH[part], weight_VH, bias_V)
            if ctx.kept is not None:
                ctx.kept.append(logits)
            logprobs[part], lse[part], entropies[part] = stats(logits, targets_N[part], curve, entropy, exact)
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, lse, entropies)
        ctx.settings = (curve, rows, entropy, fused, exact)
        ctx.sink = sink_of(weight_VH) if fused else None
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        hidden_NH, weight_VH, bias_V, targets_N, lse, entropies = ctx.saved_tensors
        curve, rows, entropy, fused, exact = ctx.settings
        g_logprobs, g_entropy = grads
        grad_hidden = torch.empty_like(hidden_NH) if ctx.needs_input_grad[0] else None
        wants_weight, wants_bias = ctx.needs_input_grad[1], bias_V is not None and ctx.needs_input_grad[2]
        sink = ctx.sink
        grad_weight = torch.zeros_like(weight_VH, dtype=exact) if wants_weight and sink is None else None
        grad_bias = torch.zeros_like(bias_V, dtype=exact) if wants_bias else None
        to_grad = _fused_grad if fused else _plain_grad
        kept, ctx.kept = ctx.kept, None
        for number, start in enumerate(range(0, hidden_NH.shape[0], rows)):
            part = slice(start, start + rows)
            logits = _logits(hidden_NH[part], weight_VH, bias_V) if kept is None else kept[number]
            g_ent = g_entropy[part] if entropy else None
            d_logits = to_grad(
                logits, targets_N[part], curve, lse[part], entropies[part], g_logprobs[part], g_ent, exact
            )
            if grad_hidden is not None:
                grad_hidden[part] = d_logits @ weight_VH
            if sink is not None and wants_weight:
                add_product_(sink, d_logits.T, hidden_NH[part])
            elif grad_weight is not None:
                grad_weight += d_logits.T @ hidden_NH[part]
            if grad_bias is not None:
                grad_bias += d_logits.sum(0, dtype=exact)
        cast = lambda grad, like: None if grad is None else grad.to(like.dtype)  # noqa: E731
        return grad_hidden, cast(grad_weight, weight_VH), cast(grad_bias, bias_V), None, None, None, None, None, None


def _has_room(size: int) -> bool:
    """Whether a GPU has so many bytes to spare, with a margin for what a backward pass needs."""
    if not torch.cuda.is_available():
        return False
    free, whole = torch.cuda.mem_get_info()
    unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return size <= whole / 10 and size + MARGIN * whole <= free + unused


def _logits(hidden: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None) -> torch.Tensor:
    logits = hidden @ weight_VH.T
    return logits if bias_V is None else logits + bias_V


def _exponents_(logits: torch.Tensor, curve: Curve) -> torch.Tensor:
    """In the place of the logits, which nobody needs any more."""
    return (logits if curve.inner is None else logits.mul_(curve.inner).tanh_()).div_(curve.divisor)


def _plain_stats(
    logits: torch.Tensor, targets: torch.Tensor, curve: Curve, entropy: bool, exact: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probability of the target, log-sum-exp and entropy of each row. The logits are overwritten."""
    z = _exponents_(logits.to(exact), curve)
    lse = z.logsumexp(-1)
    picked = z.gather(-1, targets[:, None])[:, 0]
    if not entropy:
        return picked - lse, lse, torch.zeros_like(lse)
    logp = z.sub_(lse[:, None])
    return picked - lse, lse, -logp.exp().mul_(logp).sum(-1)


def _plain_grad(
    logits: torch.Tensor,
    targets: torch.Tensor,
    curve: Curve,
    lse: torch.Tensor,
    entropies: torch.Tensor,
    g_logprobs: torch.Tensor,
    g_entropy: torch.Tensor | None,
    exact: torch.dtype,
) -> torch.Tensor:
    """d loss / d logits: g (onehot - p) for the log-probability, -g p (log p + entropy) for the entropy. The logits are
    overwritten."""
    z = _exponents_(logits.to(exact), curve)
    slope = None if curve.inner is None else (z * curve.divisor).square_().neg_().add_(1).mul_(curve.inner)
    logp = z.sub_(lse[:, None])
    if g_entropy is None:
        d = logp.exp_().mul_(-g_logprobs[:, None])
    else:
        p = logp.exp()
        by_entropy = (g_entropy[:, None] * p).mul_(logp.add_(entropies[:, None]))
        d = p.mul_(-g_logprobs[:, None]).sub_(by_entropy)
    d.scatter_add_(1, targets[:, None], g_logprobs[:, None].to(exact))
    if slope is not None:
        d.mul_(slope)
    return d.div_(curve.divisor).to(logits.dtype)


def _fused_stats(
    logits: torch.Tensor, targets: torch.Tensor, curve: Curve, entropy: bool, exact: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from lemma.models.kernels import softmax_stats

    return softmax_stats(logits, targets, curve.divisor, curve.inner)


def _fused_grad(
    logits: torch.Tensor,
    targets: torch.Tensor,
    curve: Curve,
    lse: torch.Tensor,
    entropies: torch.Tensor,
    g_logprobs: torch.Tensor,
    g_entropy: torch.Tensor | None,
    exact: torch.dtype,
) -> torch.Tensor:
    from lemma.models.kernels import softmax_grad_

    return softmax_grad_(logits, targets, curve.divisor, curve.inner, lse, entropies, g_logprobs, g_entropy)
