"""PPO (Schulman et al., 2017) for language models: a critic predicts the return at every token.

    reward of a token = score of the sample, or of the turn, on its last one, minus kl x KL to the reference on each
    A = generalised advantage estimate (gamma, lam) against the critic's values, whitened over the batch
    loss = - mean over all tokens of min(r A, clip(r) A)

Unlike the textbook: the critic is a separate model with its own optimiser, the value after the last token is 0 even if
a sample was cut off, and time runs over chosen tokens only, through all trajectories of an episode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from lemma.algorithms.algorithm import AlgorithmState
from lemma.algorithms.parts import ppo_options as parts
from lemma.algorithms.parts.episode_tokens import write_episodes
from lemma.algorithms.parts.loss_options import Epochs, GroupSize, Normalise
from lemma.algorithms.parts.policy_gradient import ClipOptions, PolicyGradient
from lemma.config.options import refuse_moved
from lemma.core.types import Group

if TYPE_CHECKING:
    from lemma.objectives.policy_loss import PolicyLoss


class Ppo(parts.CriticOptions, parts.RewardKlOptions, ClipOptions, PolicyGradient):
    """Proximal policy optimisation with a critic."""

    name: Literal["ppo"] = "ppo"
    """Proximal policy optimisation with a critic."""
    group_size: GroupSize = 1
    epochs: Epochs = 4
    normalise: Normalise = "token"
    compat: parts.PpoCompat = Field(default_factory=parts.PpoCompat)
    """Details of published runs."""

    compares: ClassVar[bool] = False

    @model_validator(mode="before")
    @classmethod
    def _moved(cls, values: Any) -> Any:
        return refuse_moved(values, parts.PPO_MOVED)

    @property
    def needs_all_groups(self) -> bool:
        return True

    @property
    def needs_truncated(self) -> str:
        return self.compat.needs_truncated

    def credited(self, group: Group) -> np.ndarray:
        return parts.scores_of(group.episodes, self.compat)

    def has_signal(self, group: Group) -> bool:
        return True

    def assign(self, groups: Sequence[Group], memory: AlgorithmState) -> None:
        """`advantage` and `return` of every token, from `value` and, for a KL in the reward, `old` and `reference`."""
        episodes = [episode for group in groups for episode in group.episodes]
        kl_BT = parts.kl_of_tokens(episodes, self.kl_estimator) if self.kl_in_reward else None
        goals = parts.targets(episodes, kl_BT, memory.numbers.get("kl_weight", self.kl), self, self.compat)
        write_episodes("advantage", episodes, goals.advantages)
        write_episodes("return", episodes, goals.returns)
        if kl_BT is not None:
            parts.track_kl(episodes, kl_BT, memory, self.kl, self.adaptive_kl)

    def objective(self, max_tokens: int, memory: AlgorithmState) -> PolicyLoss:
        loss = super().objective(max_tokens, memory)
        return replace(loss, kl=None) if self.kl_in_reward else loss
