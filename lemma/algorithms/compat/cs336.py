"""The functions of the course CS336 on padded rectangles, under its names and with its meaning.

Training works on flat tokens; these are for people who do the exercises or compare with padded code. The formulas are
those of `lemma.objectives`. Its `tokenize_prompt_and_output` is in `lemma.formats.encode`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch

from lemma.algorithms.compat.reductions import masked_mean, masked_normalize
from lemma.algorithms.parts.flat_advantages import group_advantages
from lemma.core.errors import UserError
from lemma.objectives.policy_loss import Clip, LogprobGain, Unclipped

PolicyLossType = Literal["no_baseline", "reinforce_with_baseline", "grpo_clip", "grpo_no_clip"]


def group_normalized_rewards(
    rewards: torch.Tensor, group_size: int, advantage_eps: float = 1e-6, normalize_by_std: bool = True
) -> torch.Tensor:
    """Rewards less the mean of their group (consecutive rows), over its unbiased deviation + eps where asked for."""
    assert len(rewards) % group_size == 0, "every group must be whole"
    groups = torch.arange(len(rewards)) // group_size
    scale: Literal["group", "none"] = "group" if normalize_by_std else "none"
    advantages = group_advantages(rewards.tolist(), groups.tolist(), scale=scale, epsilon=advantage_eps)
    return torch.from_numpy(advantages).to(rewards)


def compute_group_normalized_rewards(
    reward_fn: Callable[[str, str], dict[str, float]],
    rollout_responses: Sequence[str],
    repeated_ground_truths: Sequence[str],
    group_size: int,
    advantage_eps: float,
    normalize_by_std: bool,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """Advantages, raw rewards and their statistics, of responses that `reward_fn` scores under the key `reward`."""
    scores = [reward_fn(*pair)["reward"] for pair in zip(rollout_responses, repeated_ground_truths, strict=True)]
    raw = torch.tensor(scores, dtype=torch.float32)
    advantages = group_normalized_rewards(raw, group_size, advantage_eps, normalize_by_std)
    spread = raw.std().item() if len(raw) > 1 else 0.0
    return advantages, raw, {"mean": raw.mean().item(), "std": spread, "max": raw.max().item(), "min": raw.min().item()}


def naive_policy_gradient_loss(raw_rewards_or_advantages: torch.Tensor, policy_log_probs: torch.Tensor) -> torch.Tensor:
    """-A log p of each token (B, T), for one A per row (B, 1)."""
    return -LogprobGain().gain(torch.ones_like(policy_log_probs), policy_log_probs, raw_rewards_or_advantages)


def grpo_clip_loss(
    advantages: torch.Tensor, policy_log_probs: torch.Tensor, old_log_probs: torch.Tensor, cliprange: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """-min(r A, clip(r, 1 - cliprange, 1 + cliprange) A) of each token, and which of them were clipped."""
    ratio = (policy_log_probs - old_log_probs).exp()
    clip = Clip.around(cliprange)
    sides = clip.clipped(ratio, advantages)
    return -clip.gain(ratio, policy_log_probs, advantages), {"clipped": sides["low"] | sides["high"]}


def grpo_no_clip_loss(
    advantages: torch.Tensor, policy_log_probs: torch.Tensor, old_log_probs: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """-r A of each token."""
    ratio = (policy_log_probs - old_log_probs).exp()
    return -Unclipped().gain(ratio, policy_log_probs, advantages), {"ratio": ratio.detach()}


def policy_gradient_loss(
    policy_log_probs: torch.Tensor,
    loss_type: PolicyLossType,
    raw_rewards: torch.Tensor | None = None,
    advantages: torch.Tensor | None = None,
    old_log_probs: torch.Tensor | None = None,
    cliprange: float | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of each token by the name of its kind; each kind needs its own inputs."""
    if loss_type == "no_baseline":
        return naive_policy_gradient_loss(_given(raw_rewards, "raw_rewards", loss_type), policy_log_probs), {}
    signal = _given(advantages, "advantages", loss_type)
    if loss_type == "reinforce_with_baseline":
        return naive_policy_gradient_loss(signal, policy_log_probs), {}
    old = _given(old_log_probs, "old_log_probs", loss_type)
    if loss_type == "grpo_no_clip":
        return grpo_no_clip_loss(signal, policy_log_probs, old)
    if loss_type == "grpo_clip":
        return grpo_clip_loss(signal, policy_log_probs, old, _given(cliprange, "cliprange", loss_type))
    raise UserError(f"unknown loss type {loss_type!r}", fix="write one of: " + ", ".join(get_args(PolicyLossType)))


def grpo_microbatch_train_step(
    policy_log_probs: torch.Tensor,
    response_mask: torch.Tensor,
    gradient_accumulation_steps: int,
    loss_type: PolicyLossType,
    raw_rewards: torch.Tensor | None = None,
    advantages: torch.Tensor | None = None,
    old_log_probs: torch.Tensor | None = None,
    cliprange: float | None = None,
    normalize_constant: float | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Mean over rows of the mean over tokens (with a constant: of the sum over it), over the accumulation steps.

    It is back-propagated; gradients add to those already there.
    """
    losses, metrics = policy_gradient_loss(
        policy_log_probs, loss_type, raw_rewards, advantages, old_log_probs, cliprange
    )
    if normalize_constant is None:
        rows = masked_mean(losses, response_mask, dim=-1)
    else:
        rows = masked_normalize(losses, response_mask, dim=-1, normalize_constant=normalize_constant)
    loss = rows.mean() / gradient_accumulation_steps
    loss.backward()
    return loss.detach(), metrics


def _given(value: Any, name: str, loss_type: str) -> Any:
    if value is None:
        raise UserError(f"the loss {loss_type!r} needs {name}", fix=f"pass {name}=...")
    return value
