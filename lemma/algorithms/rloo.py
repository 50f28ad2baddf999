"""RLOO (Ahmadian et al., 2024): each sample is compared with the mean of the others of its group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator

from lemma.algorithms.algorithm import Memory, rewards_of, write_advantages
from lemma.algorithms.policy_gradient import Baseline, ClippedPolicyGradient, Level
from lemma.core.ranks import add_over_ranks, join_over_ranks
from lemma.core.types import Group, Trajectory


class Rloo(ClippedPolicyGradient):
    """A whole sample is one action: its ratio is the product of its tokens', and the KL may be a part of its reward."""

    name: Literal["rloo"] = "rloo"
    """REINFORCE leave-one-out."""
    reward_kl: float = Field(0.0, ge=0)
    """Weight of the KL of a whole sample to the reference, taken off its reward."""
    reward_clip: tuple[float, float] | None = None
    """Keep rewards within these two numbers, before the KL is taken off."""
    standardise: bool = False
    """Bring the advantages of the batch to mean 0 and deviation 1."""

    @model_validator(mode="after")
    def _one_kl(self) -> Self:
        if self.kl and self.reward_kl:
            raise ValueError("kl and reward_kl are two ways to the same end; keep one of them")
        if self.reward_clip is not None and self.reward_clip[0] >= self.reward_clip[1]:
            raise ValueError("reward_clip is a lower and an upper end; write for example [-1, 1]")
        return self

    @property
    def needs_reference(self) -> bool:
        return self.kl > 0 or self.reward_kl > 0

    @property
    def needs_dead_groups(self) -> bool:
        return super().needs_dead_groups or self.reward_kl > 0

    @property
    def needs_old(self) -> bool:
        return super().needs_old or self.reward_kl > 0

    @property
    def scores_first(self) -> bool:
        return super().scores_first or self.reward_kl > 0

    def compared_with(self) -> Baseline:
        return "leave_one_out"

    def ratio_level(self) -> Level:
        return "trajectory"

    def advantages(self, rewards: Sequence[np.ndarray]) -> list[np.ndarray]:
        return self._compared([self._clipped(group) for group in rewards])

    def assign(self, groups: Sequence[Group], memory: Memory) -> None:
        if not self.reward_kl:
            return super().assign(groups, memory)
        kls = [np.array([_kl(t) for t in group.trajectories]) for group in groups]
        total, count = add_over_ranks(sum(float(kl.sum()) for kl in kls), sum(len(kl) for kl in kls))
        if count:
            memory.numbers["kl_seen"] = total / count
        rewards = [
            self._clipped(rewards_of(group)) - self.reward_kl * kl for group, kl in zip(groups, kls, strict=True)
        ]
        everything, own = join_over_ranks(rewards)
        write_advantages(groups, self._compared(everything)[own])

    def _clipped(self, rewards: np.ndarray) -> np.ndarray:
        return rewards if self.reward_clip is None else np.clip(rewards, *self.reward_clip)

    def _compared(self, rewards: Sequence[np.ndarray]) -> list[np.ndarray]:
        from lemma.objectives.advantages import standardised

        found = super().advantages(rewards)
        if not self.standardise or not found:
            return found
        return np.split(standardised(np.concatenate(found)), np.cumsum([len(group) for group in found])[:-1])


def _kl(trajectory: Trajectory) -> float:
    """The KL of a whole sample by its own log-probabilities."""
    difference = trajectory.token_fields["old"] - trajectory.token_fields["reference"]
    return float(difference[trajectory.chosen_T].sum())
