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

from lemma.algorithms.algorithm import KlEstimator, Memory, write_tokens
from lemma.algorithms.policy_gradient import Baseline, ClippedPolicyGradient
from lemma.config import Options
from lemma.core.ranks import add_over_ranks
from lemma.core.types import Group, Trajectory

if TYPE_CHECKING:
    from lemma.objectives.policy_loss import PolicyLoss
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
    """How the KL of a token is estimated; in the loss k2 or k3, since k1 has no gradient on average."""
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

    def kl_is_weighted(self) -> bool:
        return self.kl_in == "reward" or self.kl_by_ratio

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
        from lemma.objectives.gae import padded, token_targets

        samples = [trajectory for group in groups for trajectory in group.trajectories]
        values, chosen = padded([_chosen(sample, "value") for sample in samples])
        kl = self._kl(samples) if self._kl_in_reward else np.zeros_like(values)
        found = token_targets(
            self._scores(samples),
            kl,
            values,
            chosen,
            score_on="last",
            kl_coef=memory.numbers.get("kl_weight", self.kl),
            whiten_rewards=self.whiten_rewards,
            whiten_advantages=self.whiten,
            gamma=self.gamma,
            lam=self.lam,
            add=add_over_ranks,
        )
        write_tokens("advantage", samples, found.advantages)
        write_tokens("return", samples, found.returns)
        if self._kl_in_reward:
            self._follow(kl.sum(-1)[chosen.any(-1)], memory)

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

    def _kl(self, samples: Sequence[Trajectory]) -> np.ndarray:
        """The KL of each chosen token to the reference, as padded rows."""
        from lemma.objectives.gae import kl_penalties, padded

        old, reference = (padded([_chosen(sample, name) for sample in samples])[0] for name in ("old", "reference"))
        return kl_penalties(old, reference, self.kl_estimator)

    def _scores(self, samples: Sequence[Trajectory]) -> np.ndarray:
        from lemma.objectives.gae import scores_by_end

        return scores_by_end(
            np.array([sample.rewards["total"] for sample in samples], dtype=np.float64),
            np.array([sample.finish != "length" for sample in samples], dtype=bool),
            missing_score=self.missing_eos_score,
            missing_penalty=self.missing_eos_penalty,
        )

    def _follow(self, kl_B: np.ndarray, memory: Memory) -> None:
        """Remember the KL of all ranks' samples that are learnt from, and adapt its weight for the next batch."""
        total, count = add_over_ranks(float(kl_B.sum()), len(kl_B))
        if not count:
            return
        memory.numbers["kl_seen"] = total / count
        if self.adaptive_kl is not None:
            from lemma.objectives.controllers import AdaptiveKl

            start = memory.numbers.get("kl_weight", self.kl)
            control = AdaptiveKl(start, self.adaptive_kl.target, self.adaptive_kl.horizon)
            control.update(memory.numbers["kl_seen"], int(count))
            memory.numbers["kl_weight"] = control.coefficient


def _chosen(sample: Trajectory, name: str) -> np.ndarray:
    return np.asarray(sample.token_fields[name], dtype=np.float64)[sample.chosen_T]
