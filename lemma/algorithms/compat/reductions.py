"""Masked sums and means over rectangular tensors, as the literature and its course exercises define them.

Training code works on flat tokens and explicit counts; these are for people who compare with padded implementations.
"""

from __future__ import annotations

import torch


def masked_normalize(
    tensor: torch.Tensor, mask: torch.Tensor, dim: int | None = None, normalize_constant: float = 1.0
) -> torch.Tensor:
    """Sum of what the mask lets through, over one dimension or all, divided by a constant."""
    kept = torch.where(mask.bool(), tensor, torch.zeros_like(tensor))
    return (kept.sum() if dim is None else kept.sum(dim)) / normalize_constant


def masked_mean(tensor: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Mean of what the mask lets through; 0/0 is not a number."""
    count = mask.bool().sum() if dim is None else mask.bool().sum(dim)
    return masked_normalize(tensor, mask, dim) / count


def masked_mean_or_zero(
    tensor: torch.Tensor, mask: torch.Tensor, dim: int | None = None, denominator: float | None = None
) -> torch.Tensor:
    """Mean of what the mask lets through; nothing let through gives 0. With a dimension: the mean of its means.

    A fixed `denominator` takes the place of the count.
    """
    sums = masked_normalize(tensor, mask, dim)
    count = mask.bool().sum() if dim is None else mask.bool().sum(dim)
    divisor = torch.full_like(sums, denominator) if denominator is not None else count.clamp(min=1)
    return (sums / divisor).mean()


def entropy(logits: torch.Tensor) -> torch.Tensor:
    """Entropy in nats of the distribution over the last dimension."""
    logp = logits.log_softmax(-1)
    return -(logp.exp() * logp).sum(-1)


def sft_microbatch_loss(
    policy_log_probs: torch.Tensor,
    response_mask: torch.Tensor,
    gradient_accumulation_steps: int,
    normalize_constant: float = 1.0,
) -> torch.Tensor:
    """Mean over rows of the summed negative log-likelihood over a constant, divided by the accumulation steps."""
    per_row = masked_normalize(-policy_log_probs, response_mask, dim=-1, normalize_constant=normalize_constant)
    return per_row.mean() / gradient_accumulation_steps


def sft_microbatch_train_step(
    policy_log_probs: torch.Tensor,
    response_mask: torch.Tensor,
    gradient_accumulation_steps: int,
    normalize_constant: float = 1.0,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """`sft_microbatch_loss`, back-propagated; gradients add to those already there."""
    loss = sft_microbatch_loss(policy_log_probs, response_mask, gradient_accumulation_steps, normalize_constant)
    loss.backward()
    return loss.detach(), {"trained_tokens": response_mask.bool().sum()}
