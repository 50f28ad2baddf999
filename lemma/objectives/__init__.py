"""Losses as pure functions on flat tokens. Each is one formula in one place; the learner serves them all alike."""

from collections.abc import Callable

from lemma.objectives.cs336 import (
    compute_group_normalized_rewards,
    group_normalized_rewards,
    grpo_clip_loss,
    grpo_microbatch_train_step,
    grpo_no_clip_loss,
    naive_policy_gradient_loss,
    policy_gradient_loss,
    tokenize_prompt_and_output,
)
from lemma.objectives.likelihood import NegativeLogLikelihood
from lemma.objectives.mixed import MIXED_FORMS, MixedPolicyLoss
from lemma.objectives.objective import Loss, Objective, Terms, Totals
from lemma.objectives.policy_forms import POLICY_FORMS
from lemma.objectives.policy_loss import PolicyLoss
from lemma.objectives.preference import PREFERENCE_OBJECTIVES
from lemma.objectives.reductions import (
    entropy,
    masked_mean,
    masked_mean_or_zero,
    masked_normalize,
    sft_microbatch_loss,
    sft_microbatch_train_step,
)
from lemma.objectives.value import ClippedValueLoss

# Every objective, in each form that changes what must stay together; the invariance tests run over this table.
OBJECTIVES: dict[str, Callable[[], Objective]] = {
    "nll_token": lambda: NegativeLogLikelihood("token"),
    "nll_sequence": lambda: NegativeLogLikelihood("sequence"),
    "nll_constant": lambda: NegativeLogLikelihood("constant", constant=42.0),
    **PREFERENCE_OBJECTIVES,
    **POLICY_FORMS,
    **MIXED_FORMS,
    "value": ClippedValueLoss,
}

__all__ = [
    "OBJECTIVES",
    "ClippedValueLoss",
    "Loss",
    "MixedPolicyLoss",
    "NegativeLogLikelihood",
    "Objective",
    "PolicyLoss",
    "Terms",
    "Totals",
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
    "tokenize_prompt_and_output",
]
