"""LOOP (Chen et al., 2025): leave-one-out advantages with PPO's loss on tokens, made for agents with tools.

    A = R - mean of the others, 0 where it is below least_advantage in size
    loss = - mean over samples of the mean over their tokens of min(r A, clip(r) A)

What is left out still counts in the divisors, as dead groups do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from lemma.algorithms.parts.advantages import compared
from lemma.algorithms.parts.flat_advantages import is_large
from lemma.algorithms.parts.loss_options import Epochs, GroupSize, Level
from lemma.algorithms.parts.policy_gradient import PolicyGradient, RatioOptions
from lemma.config.options import refuse_unused

if TYPE_CHECKING:
    from lemma.objectives.policy_loss import Surrogate


class Loop(RatioOptions, PolicyGradient):
    """Each reward is compared with the mean of the other samples' rewards; the clip is symmetric in the log-ratio."""

    name: Literal["loop"] = "loop"
    """Leave-one-out proximal policy optimisation."""
    group_size: GroupSize = 6
    epochs: Epochs = 2
    clip: float | None = Field(0.1, gt=0)
    """The ratio is clipped to the range from 1 / (1 + clip) to 1 + clip; null: plain log-probabilities, no ratio."""
    ratio: Literal["token", "turn", "trajectory"] = "token"
    """Level of the importance ratio: each token's own, the product over a turn's tokens, or the product over the
    sample's."""
    leave_out_own: bool = True
    """Compare each reward with the mean of the other samples; otherwise with the mean of all samples."""
    least_advantage: float = Field(0.01, ge=0)
    """Advantages smaller than this in absolute value are set to 0."""
    positive_only: bool = False
    """Train only on samples with a positive advantage."""

    @model_validator(mode="after")
    def _clip_for_reuse(self) -> Self:
        if self.clip is None and self.updates > 1:
            raise ValueError("loop without clip uses a batch once; write `epochs: 1` and `mini_batches: 1`, or a clip")
        if self.clip is None and not self.kl_by_ratio:
            refuse_unused(self, ("ratio",), "with `clip: null`", "write for example `clip: 0.1`")
        return self

    @property
    def ratio_level(self) -> Level:
        return self.ratio

    def advantages(self, rewards: Sequence[np.ndarray]) -> list[np.ndarray]:
        baseline: Literal["leave_one_out", "mean"] = "leave_one_out" if self.leave_out_own else "mean"
        groups = compared(rewards, baseline, scale=self.scale, epsilon=self.epsilon, unbiased=False)
        return [np.where(is_large(a, self.least_advantage, self.positive_only), a, 0.0) for a in groups]

    def surrogate(self) -> Surrogate:
        from lemma.objectives.policy_loss import Clip, LogprobGain

        return LogprobGain() if self.clip is None else Clip.symmetric_in_log(self.clip)
