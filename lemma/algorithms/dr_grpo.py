"""Dr. GRPO (Liu et al., 2025): GRPO without its two biases, the division by the standard deviation and by a sample's
length.

A = R - mean of the group
loss = - mean over samples of the sum over their tokens of min(r A, clip(r) A) / constant
"""

from __future__ import annotations

from typing import Literal

from lemma.algorithms.parts.loss_options import Normalise
from lemma.algorithms.parts.policy_gradient import ClipOptions, PolicyGradient, RatioOptions


class DrGrpo(ClipOptions, RatioOptions, PolicyGradient):
    """Advantages are rewards minus the group's mean, unscaled; sums over tokens are divided by a constant."""

    name: Literal["dr_grpo"] = "dr_grpo"
    """GRPO done right."""
    normalise: Normalise = "constant"
