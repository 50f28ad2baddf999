"""Dr. GRPO (Liu et al., 2025): GRPO without its two biases, the deviation and the length of a sample."""

from __future__ import annotations

from typing import Literal

from lemma.algorithms.policy_gradient import ClippedPolicyGradient


class DrGrpo(ClippedPolicyGradient):
    """Advantages are rewards less the group's mean, unscaled; sums over tokens are divided by a constant."""

    name: Literal["dr_grpo"] = "dr_grpo"
    """GRPO done right."""
    normalise: Literal["token", "sequence", "constant"] = "constant"
    """The loss is a mean over tokens, a mean over samples of the means over their tokens, or a mean over samples of
    sums divided by `constant`."""
