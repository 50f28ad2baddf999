"""RLOO (Ahmadian et al., 2024): each sample is compared with the mean of the others of its group.

A = R - mean of the others, where R may have the KL of the whole sample taken off
loss = - mean over samples of min(r A, clip(r) A), with r the product of the ratios of a sample's tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator

from lemma.algorithms.algorithm import AlgorithmState
from lemma.algorithms.parts.advantages import compared, rewards_of, write_advantages
from lemma.algorithms.parts.episode_tokens import kl_of_samples, remember_kl
from lemma.algorithms.parts.flat_advantages import standardised_groups
from lemma.algorithms.parts.loss_options import Level
from lemma.algorithms.parts.policy_gradient import ClipOptions, PolicyGradient, RatioOptions
from lemma.core.types import Group


class Rloo(ClipOptions, RatioOptions, PolicyGradient):
    """A whole sample is one action: its ratio is the product of its tokens', and the KL may be part of its reward."""

    name: Literal["rloo"] = "rloo"
    """REINFORCE leave-one-out."""
    reward_kl: float = Field(0.0, ge=0)
    """Weight of a sample's summed KL to the reference, which is subtracted from its reward."""
    reward_clip: tuple[float, float] | None = None
    """Clip rewards to this range before the KL is subtracted."""
    standardise: bool = False
    """Standardise the advantages of the batch (mean 0, standard deviation 1)."""

    @model_validator(mode="after")
    def _one_kl(self) -> Self:
        if self.kl and self.reward_kl:
            raise ValueError("kl and reward_kl do the same thing; keep one of them")
        if self.reward_clip is not None and self.reward_clip[0] >= self.reward_clip[1]:
            raise ValueError("reward_clip is a lower and an upper end; write for example [-1, 1]")
        return self

    @property
    def ratio_level(self) -> Level:
        return "trajectory"

    @property
    def kl_in_reward(self) -> bool:
        return self.reward_kl > 0

    @property
    def needs_truncated(self) -> str:
        return "reward_kl" if self.reward_kl else ""

    def advantages(self, rewards: Sequence[np.ndarray]) -> list[np.ndarray]:
        return self._compared([self._within_clip(group) for group in rewards])

    def assign(self, groups: Sequence[Group], memory: AlgorithmState) -> None:
        if not self.reward_kl:
            return super().assign(groups, memory)
        kls = [kl_of_samples(group) for group in groups]
        remember_kl(sum(float(kl.sum()) for kl in kls), sum(len(kl) for kl in kls), memory)
        less_kl = [self.credited(group) - self.reward_kl * kl for group, kl in zip(groups, kls, strict=True)]
        write_advantages(groups, self._compared(less_kl))

    def credited(self, group: Group) -> np.ndarray:
        return self._within_clip(rewards_of(group))

    def _within_clip(self, rewards: np.ndarray) -> np.ndarray:
        return rewards if self.reward_clip is None else np.clip(rewards, *self.reward_clip)

    def _compared(self, rewards: Sequence[np.ndarray]) -> list[np.ndarray]:
        advantages = compared(rewards, "leave_one_out", scale=self.scale, epsilon=self.epsilon)
        return standardised_groups(advantages) if self.standardise else advantages
