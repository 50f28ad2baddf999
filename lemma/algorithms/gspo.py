"""GSPO (Zheng et al., 2025): the ratio belongs to the sample, as rewards do."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lemma.algorithms.policy_gradient import ClippedPolicyGradient, Level


class Gspo(ClippedPolicyGradient):
    """GRPO with one ratio for each sample, the geometric mean of its tokens'; it varies little, so the clip is tiny."""

    name: Literal["gspo"] = "gspo"
    """Group sequence policy optimisation."""
    scale: Literal["none", "group", "batch"] = "group"
    """Divide advantages by the standard deviation of the rewards: not at all, of the group, or of the whole batch."""
    clip: float | None = Field(3e-4, gt=0)
    """The ratio counts down to 1 - clip and up to 1 + clip; null: without an end."""
    clip_high: float | None = Field(4e-4, gt=0)
    """The distance upwards; null: the same as clip."""

    def ratio_level(self) -> Level:
        return "sequence"
