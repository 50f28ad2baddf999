"""REINFORCE (Williams, 1992): log-probabilities weighted by rewards, without a baseline or with the group's mean.

    A = R, or (R - mean of the group) / (deviation of the group + epsilon)
    loss = - mean over samples of the mean over their tokens of A log p

Nothing corrects for older samples, so each batch is used for one update. With `whiten` the advantages are those of
REINFORCE++ (Hu, 2025). If an environment rewards single turns, a token's return is the reward of this turn and later
ones; with the group's mean as the baseline, each turn's reward is compared with those of the group's turns with the
same number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from lemma.algorithms.algorithm import AlgorithmState
from lemma.algorithms.parts.advantages import compared, rewards_of
from lemma.algorithms.parts.loss_options import Scale
from lemma.algorithms.parts.policy_gradient import PolicyGradient
from lemma.algorithms.parts.turn_returns import divisors, has_returns, is_paid, write_returns
from lemma.core.types import Group

if TYPE_CHECKING:
    from lemma.objectives.policy_loss import LogprobGain


class Reinforce(PolicyGradient):
    """-R log p: each sample is weighted by its reward alone. High variance; included for comparison."""

    name: Literal["reinforce"] = "reinforce"
    """REINFORCE without a baseline."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount per token: a token with n tokens after it gets gamma^n times the advantage of the last one."""
    whiten: bool = False
    """Whiten advantages over all tokens of the batch (mean 0, standard deviation 1), as REINFORCE++ does."""

    compares: ClassVar[bool] = False

    @model_validator(mode="after")
    def _used_once(self) -> Self:
        if self.updates > 1:
            raise ValueError(
                f"{self.name} does not correct for samples of an older policy, so a batch is used once; "
                "write `epochs: 1` and `mini_batches: 1`, or use grpo"
            )
        return self

    def advantages(self, rewards: Sequence[np.ndarray]) -> list[np.ndarray]:
        return compared(rewards, "mean" if self.compares else "none", scale=self.scale, epsilon=self.epsilon)

    def surrogate(self) -> LogprobGain:
        from lemma.objectives.policy_loss import LogprobGain

        return LogprobGain()

    def has_signal(self, group: Group) -> bool:
        advantages = compared([rewards_of(group)], "mean" if self.compares else "none")[0]
        return self.whiten or has_returns(group, advantages, centred=self.compares)

    def assign(self, groups: Sequence[Group], memory: AlgorithmState) -> None:
        super().assign(groups, memory)
        if self.whiten or self.gamma < 1 or is_paid(groups):
            by = divisors([rewards_of(group) for group in groups], self.scale, self.epsilon)
            write_returns(groups, self.gamma, whitened=self.whiten, divided_by=by, centred=self.compares)


class ReinforceBaseline(Reinforce):
    """-A log p: the baseline is the mean reward of the group."""

    name: Literal["reinforce_baseline"] = "reinforce_baseline"  # type: ignore[assignment]
    """REINFORCE with the mean of the group as its baseline."""
    scale: Scale = "group"

    compares: ClassVar[bool] = True
