"""GRPO (Shao et al., 2024): samples of a problem are compared with each other; no critic.

Options make it the algorithms next to it: BNPO is `normalise: token`; LUSPO is `ratio: sequence`, `normalise: constant`
and `constant: 1`; SAPO and VESPO are surrogates. `each_reward` is GDPO: several rewards, each normalised by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from lemma.algorithms.algorithm import Memory, write_advantages
from lemma.algorithms.policy_gradient import ClippedPolicyGradient, Level
from lemma.algorithms.unused import refuse_unused
from lemma.config import Options
from lemma.core.ranks import join_over_ranks
from lemma.core.types import Group

if TYPE_CHECKING:
    from lemma.objectives.policy_surrogates import Surrogate


class SapoOptions(Options):
    """The gate 4 / t sigmoid(t (r - 1)) of SAPO: a larger t closes it sooner."""

    positive: float = Field(1.0, gt=0)
    """Its temperature t where the advantage is above 0."""
    negative: float = Field(1.05, gt=0)
    """Its temperature t elsewhere."""


class VespoOptions(Options):
    """The weight w^k exp(l (1 - w)) of VESPO, where w is the ratio of the whole sample."""

    power_positive: float = Field(2.0, ge=0)
    """Its k where the advantage is 0 or above."""
    decay_positive: float = Field(3.0, ge=0)
    """Its l where the advantage is 0 or above."""
    power_negative: float = Field(3.0, ge=0)
    """Its k elsewhere."""
    decay_negative: float = Field(2.0, ge=0)
    """Its l elsewhere."""


class Grpo(ClippedPolicyGradient):
    """Advantages are rewards less the group's mean, over its deviation; the ratio is clipped as in PPO."""

    name: Literal["grpo"] = "grpo"
    """Group-relative policy optimisation."""
    scale: Literal["none", "group", "batch"] = "group"
    """Divide advantages by the standard deviation of the rewards: not at all, of the group, or of the whole batch."""
    gain: Literal["clip", "sapo", "vespo"] = "clip"
    """What a token gains: the clipped ratio; a smooth gate instead of the edge (sapo); or the log-probability weighted
    by a smooth function of the whole sample's ratio (vespo)."""
    sapo: SapoOptions = SapoOptions()
    """The gate of `gain: sapo`."""
    vespo: VespoOptions = VespoOptions()
    """The weight of `gain: vespo`."""
    ratio: Level = "token"
    """Whose ratio counts: each token's; the sample's as the geometric mean of its tokens (sequence), or as their
    product (trajectory)."""
    each_reward: dict[str, float] | None = None
    """Normalise each reward within its group before they are summed by these weights, and the sums over the batch;
    rewards of different size then count as their weights say. Names all of the stage's rewards, those that are only
    logged with 0. Default: advantages of the weighted sum."""

    @model_validator(mode="after")
    def _surrogate_fits(self) -> Self:
        if self.gain != "clip" and (self.clip != 0.2 or self.clip_high is not None or self.clip_cap is not None):
            raise ValueError(f"{self.gain} does not clip; remove clip, clip_high and clip_cap")
        for name in ("sapo", "vespo"):
            if self.gain != name:
                refuse_unused(self, (name,), f"with `gain: {self.gain}`", f"write `gain: {name}`")
        if self.gain == "vespo" and self.ratio == "sequence":
            raise ValueError("vespo weighs by the product of a sample's ratios; write `ratio: trajectory`")
        if self.gain == "vespo" and self.mismatch_cap is not None:
            raise ValueError("vespo weighs whole samples already; remove mismatch_cap")
        if self.each_reward is not None and not self.each_reward:
            raise ValueError("each_reward names no reward; write for example `each_reward: {accuracy: 1}`")
        if self.each_reward is not None and self.scale != "group":
            raise ValueError("each_reward scales every reward by its group; remove scale or each_reward")
        return self

    def ratio_level(self) -> Level:
        return "trajectory" if self.gain == "vespo" else self.ratio

    def surrogate(self) -> Surrogate:
        from lemma.objectives.policy_surrogates import GammaWeight, SoftGate

        if self.gain == "sapo":
            return SoftGate(**self.sapo.model_dump())
        return GammaWeight(**self.vespo.model_dump()) if self.gain == "vespo" else super().surrogate()

    def assign(self, groups: Sequence[Group], memory: Memory) -> None:
        if self.each_reward is None:
            return super().assign(groups, memory)
        from lemma.objectives.advantages import summed_advantages

        tables, own = join_over_ranks([self._rewards(group) for group in groups])
        if not tables:
            return
        sizes = [len(table) for table in tables]
        numbers = np.repeat(np.arange(len(sizes)), sizes)
        weights = list(self.each_reward.values())
        found = summed_advantages(np.concatenate(tables), weights, numbers, epsilon=self.epsilon)
        write_advantages(groups, np.split(found, np.cumsum(sizes)[:-1])[own])

    def is_live(self, group: Group) -> bool:
        if self.each_reward is None:
            return super().is_live(group)
        columns = zip(self._rewards(group).T, self.each_reward.values(), strict=True)
        return any(np.any(self.advantages([column])[0] != 0) for column, weight in columns if weight)

    def _rewards(self, group: Group) -> np.ndarray:
        """The named rewards of every sample (R, K); NaN where one does not apply."""
        names = list(self.each_reward or {})
        table = [[trajectory.rewards.get(name, np.nan) for name in names] for trajectory in group.trajectories]
        return np.array(table, dtype=np.float64).reshape(len(table), len(names))
