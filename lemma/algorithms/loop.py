"""LOOP (Chen et al., 2025): leave-one-out advantages with PPO's loss on tokens, made for agents with tools.

Advantages that are nearly 0 are left out; what is left out still counts in the divisors, as dead groups do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from lemma.algorithms.policy_gradient import Baseline, Level, RatioPolicyGradient
from lemma.algorithms.unused import refuse_unused

if TYPE_CHECKING:
    from lemma.objectives.policy_surrogates import Surrogate


class Loop(RatioPolicyGradient):
    """A reward is compared with the mean of the others; the clip is as far down as up, in factors."""

    name: Literal["loop"] = "loop"
    """Leave-one-out proximal policy optimisation."""
    group_size: int = Field(6, ge=1)
    """Samples per problem."""
    epochs: int = Field(2, ge=1)
    """Passes over each batch of rollouts."""
    clip: float | None = Field(0.1, gt=0)
    """The ratio counts from 1 / (1 + clip) to 1 + clip; null: log-probabilities without a ratio."""
    ratio: Literal["token", "trajectory"] = "token"
    """Whose ratio counts: each token's, or the product over the sample."""
    leave_out_own: bool = True
    """Compare with the mean of the other samples; else with the mean of all."""
    least_advantage: float = Field(0.01, ge=0)
    """Advantages smaller than this are 0."""
    positive_only: bool = False
    """Learn from the better samples alone."""

    unbiased: ClassVar[bool] = False

    @model_validator(mode="after")
    def _clip_for_reuse(self) -> Self:
        if self.clip is None and self.epochs * self.mini_batches > 1:
            raise ValueError("loop without clip uses a batch once; write `epochs: 1` and `mini_batches: 1`, or a clip")
        if self.clip is None and not self.kl_by_ratio:
            refuse_unused(self, ("ratio",), "with `clip: null`", "write for example `clip: 0.1`")
        return self

    def compared_with(self) -> Baseline:
        return "leave_one_out" if self.leave_out_own else "mean"

    def advantages(self, rewards: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [np.where(self._is_kept(found), found, 0.0) for found in super().advantages(rewards)]

    def _is_kept(self, advantages: np.ndarray) -> np.ndarray:
        size = advantages if self.positive_only else np.abs(advantages)
        return size >= self.least_advantage

    def ratio_level(self) -> Level:
        return self.ratio

    def surrogate(self) -> Surrogate:
        from lemma.objectives.policy_surrogates import Clip, Reinforce

        return Reinforce() if self.clip is None else Clip.symmetric_in_log(self.clip)
