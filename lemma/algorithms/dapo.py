"""DAPO (Yu et al., 2025): clip-higher, a mean over tokens, and groups without advantages replaced.

    A = (R - mean of the group) / (deviation of the group + epsilon)
    loss = - mean over all tokens of min(r A, clip(r, 1 - 0.2, 1 + 0.28) A)

Its fourth part, a penalty for overlong samples, is the reward soft_overlong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from lemma.algorithms.algorithm import AlgorithmState
from lemma.algorithms.parts.advantages import compared
from lemma.algorithms.parts.loss_options import ClipHigh, Normalise, Scale
from lemma.algorithms.parts.policy_gradient import ClipOptions, PolicyGradient, RatioOptions

if TYPE_CHECKING:
    from lemma.objectives.policy_loss import PolicyLoss


class Dapo(ClipOptions, RatioOptions, PolicyGradient):
    """GRPO with a wider clip range upwards than downwards; every token has the same weight."""

    name: Literal["dapo"] = "dapo"
    """Decoupled clip and dynamic sampling."""
    scale: Scale = "group"
    normalise: Normalise = "token"
    clip_high: ClipHigh = 0.28

    replaces_groups: ClassVar[int] = 5

    def advantages(self, rewards: Sequence[np.ndarray]) -> list[np.ndarray]:
        return compared(rewards, "mean", scale=self.scale, epsilon=self.epsilon)

    def objective(self, max_tokens: int, memory: AlgorithmState) -> PolicyLoss:
        return self.policy_loss(self.clipped(), max_tokens, memory)
