"""GRPO (Shao et al., 2024): samples of a problem are compared with each other; no critic.

    A = (R - mean of the group) / (deviation of the group + epsilon)
    loss = - mean over samples of the mean over their tokens of min(r A, clip(r) A)

Options turn it into related algorithms: BNPO is `normalise: token`; LUSPO is `ratio: sequence`, `normalise: constant`
and `constant: 1`; SAPO and VESPO are gains. `each_reward` is GDPO: several rewards, each normalised by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Self

from pydantic import model_validator

from lemma.algorithms.algorithm import AlgorithmState
from lemma.algorithms.parts.each_reward import any_differs, assign_each
from lemma.algorithms.parts.loss_options import EachReward, Scale
from lemma.algorithms.parts.policy_gradient import GainOptions, PolicyGradient, RatioOptions
from lemma.core.types import Group


class Grpo(GainOptions, RatioOptions, PolicyGradient):
    """Advantages are rewards minus the group's mean, divided by its standard deviation; the ratio is clipped as in
    PPO."""

    name: Literal["grpo"] = "grpo"
    """Group-relative policy optimisation."""
    scale: Scale = "group"
    each_reward: EachReward = None

    @model_validator(mode="after")
    def _weights_fit(self) -> Self:
        if self.each_reward and self.scale != "group":
            raise ValueError("each_reward scales every reward by its group; remove scale or each_reward")
        return self

    @property
    def reward_weights(self) -> Mapping[str, float]:
        return self.each_reward or {}

    def assign(self, groups: Sequence[Group], memory: AlgorithmState) -> None:
        if not self.each_reward:
            return super().assign(groups, memory)
        assign_each(groups, self.each_reward, self.epsilon)

    def has_signal(self, group: Group) -> bool:
        return any_differs(group, self.each_reward, self.epsilon) if self.each_reward else super().has_signal(group)
