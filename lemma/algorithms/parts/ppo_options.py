"""The options of PPO (its critic, its KL as part of the reward, details of published runs), and the token targets that
they define."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from lemma.algorithms.parts.episode_tokens import of_episode, remember_kl
from lemma.algorithms.parts.loss_options import KlEstimator, KlWeight
from lemma.algorithms.parts.policy_gradient import RatioOptions
from lemma.algorithms.parts.turn_returns import Attempt
from lemma.config import Options
from lemma.config.options import refuse_unused

if TYPE_CHECKING:
    from lemma.algorithms.algorithm import AlgorithmState
    from lemma.objectives.gae import TokenTargets
    from lemma.objectives.value import ClippedValueLoss


class AdaptiveKlOptions(Options):
    """A weight of the KL penalty that adapts to keep the KL near a target."""

    target: float = Field(6.0, gt=0)
    """Target KL of a whole sample, in nats."""
    horizon: float = Field(10_000.0, gt=0)
    """Number of samples over which the weight changes by at most a fifth."""


class RewardKlOptions(RatioOptions):
    """A KL to the reference in the reward of each token, or in the loss."""

    kl: KlWeight = 0.05
    kl_in: Literal["reward", "loss"] = "reward"
    """Whether the KL is subtracted from the reward of each token, or added to the loss."""
    kl_estimator: KlEstimator = "k1"
    adaptive_kl: AdaptiveKlOptions | None = None
    """Adapt the weight of the KL to the measured KL."""

    @model_validator(mode="after")
    def _kl_fits(self) -> Self:
        if self.adaptive_kl is not None and not self.kl_in_reward:
            raise ValueError(
                "adaptive_kl applies only to a KL in the reward; write `kl_in: reward` and `kl: 0.05`, or remove it"
            )
        if self.kl_by_ratio and self.kl_in == "reward":
            raise ValueError("kl_by_ratio applies only to a KL in the loss; write `kl_in: loss`, or remove it")
        if not self.kl:
            refuse_unused(self, ("kl_in",), "with `kl: 0`", "write for example `kl: 0.04`")
        return self

    @property
    def kl_in_reward(self) -> bool:
        return self.kl > 0 and self.kl_in == "reward"

    @property
    def kl_is_weighted(self) -> bool:
        return self.kl_in == "reward" or self.kl_by_ratio


class CriticOptions(Options):
    """A value model that is trained alongside the policy."""

    gamma: float = Field(1.0, gt=0, le=1)
    """Discount of later rewards, per token."""
    lam: float = Field(0.95, ge=0, le=1)
    """GAE's lambda: 0 trusts the critic's next value, 1 the sampled rewards."""
    whiten: bool = True
    """Whiten advantages over the batch (mean 0, standard deviation 1)."""
    value_clip: float | None = Field(0.2, gt=0)
    """Clip range of the value loss: how far a value may move from its old one within a batch; null: no clipping."""
    value_weight: float = Field(0.1, gt=0)
    """Weight of the critic's loss; it matters only if the gradient is clipped."""
    value_lr: float | None = Field(None, gt=0)
    """Learning rate of the critic. Default: the policy's."""
    value_path: str | None = Field(None, min_length=1)
    """The model whose body the critic begins with, under a new head: a folder, a hub name or a GGUF file with the
    policy's vocabulary. Default: the model that the stage starts from."""

    needs_critic: ClassVar[bool] = True

    @property
    def critic_lr(self) -> float | None:
        return self.value_lr

    @property
    def critic_path(self) -> str | None:
        return self.value_path

    def value_objective(self) -> ClippedValueLoss:
        from lemma.objectives.value import ClippedValueLoss

        return ClippedValueLoss(self.value_clip, self.value_weight)


class PpoCompat(Options):
    """Details of published runs."""

    whiten_rewards: bool = False
    """Scale token rewards to standard deviation 1 over the batch before advantages are estimated."""
    missing_eos_penalty: float | None = Field(None, gt=0)
    """Subtracted from the score of a sample that was cut off before its end-of-sequence token."""
    missing_eos_score: float | None = None
    """The score of a sample that was cut off before its end-of-sequence token, whatever it says."""

    @model_validator(mode="after")
    def _one_score(self) -> Self:
        if self.missing_eos_penalty is not None and self.missing_eos_score is not None:
            raise ValueError("missing_eos_penalty changes a score that missing_eos_score replaces; remove one of them")
        return self

    @property
    def needs_truncated(self) -> str:
        """Name of the option that needs truncated samples; empty if there is none."""
        names = ("missing_eos_penalty", "missing_eos_score")
        return next((f"compat.{name}" for name in names if getattr(self, name) is not None), "")


PPO_MOVED = {name: f"compat.{name}" for name in PpoCompat.model_fields}


def kl_of_tokens(episodes: Sequence[Attempt], estimator: KlEstimator) -> np.ndarray:
    """The KL of each chosen token to the reference, as padded rows (B, T)."""
    from lemma.objectives.gae import kl_penalties, padded

    old, reference = (padded([of_episode(one, name) for one in episodes])[0] for name in ("old", "reference"))
    return kl_penalties(old, reference, estimator)


def scores_of(episodes: Sequence[Attempt], compat: PpoCompat) -> np.ndarray:
    """The score of each episode (B,), less what it costs to be cut off."""
    from lemma.objectives.gae import scores_by_end

    return scores_by_end(
        np.array([one[-1].rewards["total"] for one in episodes], dtype=np.float64),
        np.array([one[-1].finish != "length" for one in episodes], dtype=bool),
        missing_score=compat.missing_eos_score,
        missing_penalty=compat.missing_eos_penalty,
    )


def targets(
    episodes: Sequence[Attempt], kl_BT: np.ndarray | None, kl_weight: float, critic: CriticOptions, compat: PpoCompat
) -> TokenTargets:
    """Advantages and returns of the chosen tokens of each episode, as padded rows, from the critic's values.

    Tokens read between turns are not time steps, and neither is a point where history was rewritten: the next value is
    that of the next chosen token, in whichever trajectory it is.
    """
    from lemma.objectives.gae import padded, token_targets

    values_BT, chosen_BT = padded([of_episode(one, "value") for one in episodes])
    paid_BT, _ = padded([of_episode(one, "paid") for one in episodes])
    scores_B = scores_of(episodes, compat)
    return token_targets(
        scores_B - paid_BT.sum(-1),
        np.zeros_like(values_BT) if kl_BT is None else kl_BT,
        values_BT,
        chosen_BT,
        score_on="last",
        kl_coef=kl_weight,
        whiten_rewards=compat.whiten_rewards,
        whiten_advantages=critic.whiten,
        gamma=critic.gamma,
        lam=critic.lam,
        paid=paid_BT,
    )


def track_kl(
    episodes: Sequence[Attempt],
    kl_BT: np.ndarray,
    memory: AlgorithmState,
    weight: float,
    adaptive: AdaptiveKlOptions | None,
) -> None:
    """Remember the mean KL of the trained episodes, and adapt its weight if `adaptive` is set."""
    learnt_B = np.array([any(part.trained_tokens for part in one) for one in episodes], dtype=bool)
    kl_B = kl_BT.sum(-1)[learnt_B]
    count = remember_kl(float(kl_B.sum()), len(kl_B), memory)
    if count and adaptive is not None:
        from lemma.objectives.controllers import AdaptiveKl

        control = AdaptiveKl(memory.numbers.get("kl_weight", weight), adaptive.target, adaptive.horizon)
        control.update(memory.numbers["kl_seen"], count)
        memory.numbers["kl_weight"] = control.coefficient
