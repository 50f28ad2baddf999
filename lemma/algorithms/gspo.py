"""GSPO (Zheng et al., 2025): the ratio is per sample, as rewards are.

A = (R - mean of the group) / (deviation of the group + epsilon)
loss = - mean over samples of min(r A, clip(r) A), with r the geometric mean of the ratios of a sample's tokens
"""

from __future__ import annotations

from typing import Literal

from lemma.algorithms.parts.loss_options import Clip, ClipHigh, Level, Scale
from lemma.algorithms.parts.policy_gradient import ClipOptions, PolicyGradient, RatioOptions


class Gspo(ClipOptions, RatioOptions, PolicyGradient):
    """GRPO with one ratio per sample, the geometric mean of its tokens' ratios; it varies little, so the clip is
    tiny."""

    name: Literal["gspo"] = "gspo"
    """Group sequence policy optimisation."""
    scale: Scale = "group"
    clip: Clip = 3e-4
    clip_high: ClipHigh = 4e-4

    @property
    def ratio_level(self) -> Level:
        return "sequence"
