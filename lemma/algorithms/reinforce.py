"""REINFORCE (Williams, 1992): log-probabilities weighted by rewards, without a baseline or with the group's mean.

Nothing corrects for older samples, so each batch is used for one update. With `whiten` the advantages are those of
REINFORCE++ (Hu, 2025).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import Field

from lemma.algorithms.algorithm import Memory, rewards_of, write_tokens
from lemma.algorithms.policy_gradient import Baseline, PolicyGradient
from lemma.core.ranks import add_over_ranks, join_over_ranks
from lemma.core.types import Group

if TYPE_CHECKING:
    from lemma.objectives.policy_surrogates import Surrogate


class Reinforce(PolicyGradient):
    """-R log p: every sample counts by its reward alone. High variance; here to compare with."""

    name: Literal["reinforce"] = "reinforce"
    """REINFORCE without a baseline."""
    gamma: float = Field(1.0, gt=0, le=1)
    """The advantage of a token is this to the power of how many tokens come after it, times that of the last one."""
    whiten: bool = False
    """Bring the advantages of all tokens of the batch to mean 0 and deviation 1, as REINFORCE++ does."""

    has_ratio: ClassVar[bool] = False

    def compared_with(self) -> Baseline:
        return "none"

    def is_live(self, group: Group) -> bool:
        return self.whiten or super().is_live(group)

    def assign(self, groups: Sequence[Group], memory: Memory) -> None:
        if not self.whiten and self.gamma == 1:
            return super().assign(groups, memory)
        from lemma.objectives.gae import padded, returns_to_go, whiten

        everything, own = join_over_ranks([rewards_of(group) for group in groups])
        found = np.concatenate([np.zeros(0), *self.advantages(everything)[own]])
        samples = [trajectory for group in groups for trajectory in group.trajectories]
        last, mask = padded([np.arange(n := sample.trained_tokens) == n - 1 for sample in samples])
        advantages = returns_to_go(last * found[:, None], mask, self.gamma)
        if self.whiten:
            advantages = whiten(advantages, mask, add=add_over_ranks)
        write_tokens("advantage", samples, advantages)

    def surrogate(self) -> Surrogate:
        from lemma.objectives.policy_surrogates import Reinforce as LogProbability

        return LogProbability()


class ReinforceBaseline(Reinforce):
    """-A log p: the baseline is the mean reward of the group."""

    name: Literal["reinforce_baseline"] = "reinforce_baseline"  # type: ignore[assignment]
    """REINFORCE with the mean of the group as its baseline."""
    scale: Literal["none", "group", "batch"] = "group"
    """Divide advantages by the standard deviation of the rewards: not at all, of the group, or of the whole batch."""

    def compared_with(self) -> Baseline:
        return "mean"
