"""DAPO (Yu et al., 2025): clip-higher, a mean over tokens, and groups without advantages replaced.

    A = (R - mean of the group) / (deviation of the group + epsilon)
    loss = - mean over all tokens of min(r A, clip(r, 1 - 0.2, 1 + 0.28) A)

Its fourth part, a penalty for overlong samples, is the reward soft_overlong.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from lemma.algorithms.parts.loss_options import ClipHigh, Normalise, Scale
from lemma.algorithms.parts.policy_gradient import ClipOptions, PolicyGradient, RatioOptions


class Dapo(ClipOptions, RatioOptions, PolicyGradient):
    """GRPO with a wider clip range upwards than downwards; every token has the same weight."""

    name: Literal["dapo"] = "dapo"
    """Decoupled clip and dynamic sampling."""
    scale: Scale = "group"
    normalise: Normalise = "token"
    clip_high: ClipHigh = 0.28

    replaces_groups: ClassVar[int] = 5
