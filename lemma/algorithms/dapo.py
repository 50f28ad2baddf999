"""DAPO (Yu et al., 2025): clip-higher, a mean over tokens, and groups without advantages replaced.

Its fourth part, a penalty for overlong samples, is the reward soft_overlong.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from lemma.algorithms.policy_gradient import ClippedPolicyGradient


class Dapo(ClippedPolicyGradient):
    """GRPO with more room upwards than downwards; every token counts the same."""

    name: Literal["dapo"] = "dapo"
    """Decoupled clip and dynamic sampling."""
    scale: Literal["none", "group", "batch"] = "group"
    """Divide advantages by the standard deviation of the rewards: not at all, of the group, or of the whole batch."""
    normalise: Literal["token", "sequence", "constant"] = "token"
    """The loss is a mean over tokens, a mean over samples of the means over their tokens, or a mean over samples of
    sums divided by `constant`."""
    clip_high: float | None = Field(0.28, gt=0)
    """The distance upwards; null: the same as clip."""

    replaces_dead: ClassVar[int] = 5
