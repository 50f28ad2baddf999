"""LUFFY: a teacher's traces enter the group in addition to the policy's own samples (arXiv 2504.14945).

    A = R - mean of the group, the traces included
    loss = - sum over tokens of A r, or of A p / (p + gamma) for a teacher's, / constant  -  entropy x mean entropy

A teacher's tokens have no ratio to an old policy. Their probability under the policy takes its place, reshaped so that
unlikely tokens are learnt too, and is not clipped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from lemma.algorithms.algorithm import AlgorithmState
from lemma.algorithms.parts.advantages import rewards_of
from lemma.algorithms.parts.luffy_options import LuffyOptions
from lemma.algorithms.parts.traces import by_origin, mixed_advantages, off_policy, target_probs, taught
from lemma.core.types import Group

if TYPE_CHECKING:
    from lemma.objectives.mixed import MixedPolicyLoss


class Luffy(LuffyOptions):
    """Off-policy guidance: a teacher's samples in every group, weighted by how likely they are under the policy."""

    name: Literal["luffy"] = "luffy"
    """Off-policy guidance from a teacher's traces."""

    def assign(self, groups: Sequence[Group], memory: AlgorithmState) -> None:
        for group in groups:
            for trajectory, advantage_T in zip(group.trajectories, self.of_tokens(group), strict=True):
                trajectory.token_fields["advantage"] = advantage_T
                if self.needs_trace_probs:
                    trajectory.token_fields["target_prob"] = target_probs(group, trajectory)

    def has_signal(self, group: Group) -> bool:
        if self.sft_weight is not None and any(off_policy(t)[t.loss_mask_T].any() for t in group.trajectories):
            return True
        rows = zip(group.trajectories, self.of_tokens(group), strict=True)
        return any(advantage_T[trajectory.loss_mask_T].any() for trajectory, advantage_T in rows)

    def of_tokens(self, group: Group) -> list[np.ndarray]:
        """The advantage of every token of each sample."""
        same, scaled = np.zeros(len(group.episodes)), self.scale == "group"
        advantages = mixed_advantages(
            rewards_of(group), same, taught(group), statistics=self.statistics, use_std=scaled
        )
        return by_origin(group, advantages, self.off_policy.factor, self.compat, self.group_size)

    def objective(self, max_tokens: int, memory: AlgorithmState) -> MixedPolicyLoss:
        from lemma.objectives.mixed import MixedPolicyLoss
        from lemma.objectives.policy_loss import Clip, KlTerm, MismatchWeight, Unclipped

        return MixedPolicyLoss(
            surrogate=Unclipped() if self.clip is None else Clip.around(self.clip, self.clip_high),
            normalise=self.normalise,
            constant=self.constant or float(max_tokens),
            off_shape=self.off_policy.shape(),
            off_min=self.off_policy.min,
            off_max=self.off_policy.max,
            sft=self.sft_weight,
            kl=KlTerm(self.kl, self.kl_estimator) if self.kl else None,
            mismatch=None if self.mismatch_cap is None else MismatchWeight(cap=self.mismatch_cap),
            name=self.name,
            **self.compat.of_loss(self.entropy, memory),
        )

    def observe(self, metrics: Mapping[str, float], memory: AlgorithmState) -> None:
        self.compat.observe(self.entropy, metrics, memory)
