"""PPO (Schulman et al., 2017) for language models: a critic says what was to be expected, token by token.

Each token has a reward: the score of its sample on the last one, less a KL penalty on every one. Advantages are
generalised estimates against the critic's values, whitened over the batch. Beside the textbook: the critic is a model
of its own with an optimiser of its own, and the value after the last token is 0, whether the sample ended or was cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from lemma.algorithms.base import KlEstimator, Memory
from lemma.algorithms.policy_gradient import Baseline, ClippedPolicyGradient
from lemma.config import Options
from lemma.core.types import Group, Trajectory

if TYPE_CHECKING:
    from lemma.objectives.policy import PolicyLoss
    from lemma.objectives.value import ClippedValueLoss


class AdaptiveKlOptions(Options):
    """A weight of the KL penalty that holds the KL near a target."""

    target: float = Field(6.0, gt=0)
    """KL of a whole sample to hold, in nats."""
    horizon: float = Field(10_000.0, gt=0)
    """Samples in which the weight changes by a fifth at most."""


class Ppo(ClippedPolicyGradient):
    """Proximal policy optimisation with a critic."""

    name: Literal["ppo"] = "ppo"
    """Proximal policy optimisation with a critic."""
    group_size: int = Field(1, ge=1)
    """Samples per problem; they are not compared with each other."""
    epochs: int = Field(4, ge=1)
    """Passes over each batch of rollouts."""
    normalise: Literal["token", "sequence", "constant"] = "token"
    """The loss is a mean over tokens, a mean over samples of the means over their tokens, or a mean over samples of
    sums divided by `constant`."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount of later rewards, per token."""
    lam: float = Field(0.95, ge=0, le=1)
    """GAE's lambda: 0 trusts the critic's next value, 1 the sampled rewards."""
    whiten: bool = True
    """Shift and scale advantages to mean 0 and deviation 1 over the batch."""
    whiten_rewards: bool = False
    """Scale the rewards of tokens to deviation 1 over the batch before advantages are estimated."""
    kl: float = Field(0.05, ge=0)
    """Weight of the KL to the model the stage began with. At 0 no reference model is held."""
    kl_in: Literal["reward", "loss"] = "reward"
    """Whether the KL is taken off the reward of each token, or added to the loss."""
    kl_estimator: KlEstimator = "k1"
    """How the KL of a token is estimated."""
    adaptive_kl: AdaptiveKlOptions | None = None
    """Let the weight of the KL follow the KL."""
    missing_eos_penalty: float | None = Field(None, gt=0)
    """Taken off the score of a sample that was cut off before it ended."""
    missing_eos_score: float | None = None
    """The score of a sample that was cut off before it ended, whatever it says."""
    value_clip: float | None = Field(0.2, gt=0)
    """A value counts as moved by this much at most in a batch; null: without an end."""
    value_weight: float = Field(0.1, gt=0)
    """Weight of the critic's loss; it matters beside the gradient clip only."""
    value_lr: float | None = Field(None, gt=0)
    """Learning rate of the critic. Default: the policy's."""

    needs_critic: ClassVar[bool] = True
    kl_options: ClassVar[tuple[str, ...]] = ("kl_estimator", "kl_by_ratio", "kl_in")

    @model_validator(mode="after")
    def _works_together(self) -> Self:
        if self.missing_eos_penalty is not None and self.missing_eos_score is not None:
            raise ValueError("missing_eos_penalty changes a score that missing_eos_score replaces; remove one of them")
        if self.adaptive_kl is not None and (self.kl_in != "reward" or not self.kl):
            raise ValueError("adaptive_kl is of a KL in the reward; write `kl_in: reward` and `kl: 0.05`, or remove it")
        if self.kl_by_ratio and self.kl_in == "reward":
            raise ValueError("kl_by_ratio is of a KL in the loss; write `kl_in: loss`, or remove it")
        return self

    def compared_with(self) -> Baseline:
        return "none"

    # --- what the loop asks ------------------------------------------------------------------------------------

    @property
    def needs_old(self) -> bool:
        return self.updates > 1 or self._kl_in_reward

    @property
    def needs_dead_groups(self) -> bool:
        return True

    @property
    def critic_lr(self) -> float | None:
        return self.value_lr

    def is_live(self, group: Group) -> bool:
        return True

    def assign(self, groups: Sequence[Group], memory: Memory) -> None:
        """`advantage` and `return` of every token, from `value`, and for a KL in the reward `old` and `reference`."""
        from lemma.objectives.gae import gae_of_sequences, whiten

        samples = [trajectory for group in groups for trajectory in group.trajectories]
        rewards, seen = self._rewards(samples, memory)
        values = [_chosen(sample, "value") for sample in samples]
        advantages, returns = gae_of_sequences(rewards, values, gamma=self.gamma, lam=self.lam)
        if self.whiten:
            advantages = _apart(whiten(_together(advantages)), advantages)
        for sample, advantage, target in zip(samples, advantages, returns, strict=True):
            for name, numbers in (("advantage", advantage), ("return", target)):
                sample.token_fields[name] = np.zeros(len(sample))
                sample.token_fields[name][sample.chosen_T] = numbers
        self._follow(seen, memory)

    def objective(self, max_tokens: int, memory: Memory) -> PolicyLoss:
        loss = super().objective(max_tokens, memory)
        return replace(loss, kl=None) if self._kl_in_reward else loss

    def value_objective(self) -> ClippedValueLoss:
        from lemma.objectives.value import ClippedValueLoss

        return ClippedValueLoss(self.value_clip, self.value_weight)

    # --- pieces ------------------------------------------------------------------------------------------------

    @property
    def _kl_in_reward(self) -> bool:
        return self.kl > 0 and self.kl_in == "reward"

    def _rewards(self, samples: Sequence[Trajectory], memory: Memory) -> tuple[list[np.ndarray], list[float]]:
        """The reward of each chosen token of each sample, and the KL of each sample where it is a part of them."""
        from lemma.objectives.gae import kl_penalties, rewards_with_kl, whiten

        weight = memory.numbers.get("kl_weight", self.kl)
        rewards, seen = [], []
        for sample in samples:
            scores = np.zeros(sample.trained_tokens)
            scores[-1:] = self._score(sample)
            if self._kl_in_reward:
                kl = kl_penalties(_chosen(sample, "old"), _chosen(sample, "reference"), self.kl_estimator)
                scores = rewards_with_kl(scores, kl, weight)
                seen.append(float(kl.sum()))
            rewards.append(scores)
        if self.whiten_rewards:
            rewards = _apart(whiten(_together(rewards), shift_mean=False), rewards)
        return rewards, seen

    def _score(self, sample: Trajectory) -> float:
        score = sample.rewards["total"]
        if sample.finish != "length":
            return score
        return score - (self.missing_eos_penalty or 0.0) if self.missing_eos_score is None else self.missing_eos_score

    def _follow(self, seen: Sequence[float], memory: Memory) -> None:
        """Remember the KL, and adapt its weight for the next batch."""
        if not seen:
            return
        memory.numbers["kl_seen"] = float(np.mean(seen))
        if self.adaptive_kl is not None:
            from lemma.objectives.controllers import AdaptiveKl

            start = memory.numbers.get("kl_weight", self.kl)
            control = AdaptiveKl(start, self.adaptive_kl.target, self.adaptive_kl.horizon)
            control.update(memory.numbers["kl_seen"], len(seen))
            memory.numbers["kl_weight"] = control.coefficient


def _chosen(sample: Trajectory, name: str) -> np.ndarray:
    return np.asarray(sample.token_fields[name], dtype=np.float64)[sample.chosen_T]


def _together(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0), *parts])


def _apart(numbers: np.ndarray, like: Sequence[np.ndarray]) -> list[np.ndarray]:
    return np.split(numbers, np.cumsum([len(part) for part in like])[:-1]) if like else []
