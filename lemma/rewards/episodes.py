"""The environment's own score of an episode."""

from __future__ import annotations

from typing import ClassVar, Literal

from lemma.rewards.reward import Reward
from lemma.rewards.reward_input import RewardInput


class EnvironmentReward(Reward):
    """The environment's own reward. If it is unknown, the episode is left out."""

    name: Literal["environment"] = "environment"
    """Which reward."""

    needs_verdict: ClassVar[bool] = True
    leaves_out: ClassVar[bool] = True

    def score(self, item: RewardInput) -> float | None:
        return None if item.outcome is None else item.outcome.reward
