"""Functions of a course and of other code bases on padded rectangles, made of the formulas that training uses."""

from lemma.algorithms.compat.cs336 import (
    compute_group_normalized_rewards,
    group_normalized_rewards,
    grpo_clip_loss,
    grpo_microbatch_train_step,
    grpo_no_clip_loss,
    naive_policy_gradient_loss,
    policy_gradient_loss,
)
from lemma.algorithms.compat.reductions import (
    entropy,
    masked_mean,
    masked_mean_or_zero,
    masked_normalize,
    sft_microbatch_loss,
    sft_microbatch_train_step,
)

__all__ = [
    "compute_group_normalized_rewards",
    "entropy",
    "group_normalized_rewards",
    "grpo_clip_loss",
    "grpo_microbatch_train_step",
    "grpo_no_clip_loss",
    "masked_mean",
    "masked_mean_or_zero",
    "masked_normalize",
    "naive_policy_gradient_loss",
    "policy_gradient_loss",
    "sft_microbatch_loss",
    "sft_microbatch_train_step",
]
