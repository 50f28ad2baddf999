"""What the algorithms of policy gradients share: options, advantages from groups, and how they become an objective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from lemma.algorithms.algorithm import K1_IN_LOSS, Algorithm, KlEstimator, Memory
from lemma.algorithms.unused import refuse_unused

if TYPE_CHECKING:
    from lemma.objectives.policy_loss import PolicyLoss
    from lemma.objectives.policy_surrogates import Surrogate

Level = Literal["token", "sequence", "trajectory"]
Baseline = Literal["none", "mean", "leave_one_out"]


class PolicyGradient(Algorithm):
    """An advantage for every sample, and a loss that makes tokens of better samples more likely."""

    scale: Literal["none", "group", "batch"] = "none"
    """Divide advantages by the standard deviation of the rewards: not at all, of the group, or of the whole batch."""
    epsilon: float = Field(1e-6, ge=0)
    """Added to the standard deviation before dividing by it."""
    normalise: Literal["token", "sequence", "constant"] = "sequence"
    """The loss is a mean over tokens, a mean over samples of the means over their tokens, or a mean over samples of
    sums divided by `constant`."""
    constant: float | None = Field(None, gt=0)
    """Divisor for `normalise: constant`. Default: the longest response."""
    kl: float = Field(0.0, ge=0)
    """Weight of the KL to the model the stage began with, as a part of the loss. At 0 no reference model is held."""
    kl_estimator: KlEstimator = "k3"
    """How the KL of a token is estimated."""
    entropy: float = Field(0.0, ge=0)
    """Weight of a bonus for the mean entropy of tokens."""
    entropy_target: float | None = Field(None, gt=0)
    """Raise the weight of the bonus after each step that ends below this entropy (in nats), lower it otherwise, and
    give no bonus above it."""
    entropy_step: float = Field(0.005, gt=0)
    """How much `entropy_target` changes the weight in a step."""
    entropy_max: float = Field(1.0, gt=0)
    """Largest weight that `entropy_target` leads to."""
    mismatch_cap: float | None = Field(None, gt=0)
    """Weigh tokens by how likely the learner finds them beside the engine that sampled them, at most by this much; 2
    is usual. Default: no such weight."""
    mismatch_floor: float | None = Field(None, ge=0)
    """Least mismatch weight."""
    mismatch_level: Literal["token", "sequence"] = "token"
    """Whether a mismatch weight is of a token or of a whole sample."""
    mismatch_mask: bool = False
    """Leave out what lies beyond cap and floor, instead of cutting its weight."""

    unbiased: ClassVar[bool] = True
    """Whether the deviation divides by one sample less."""
    has_ratio: ClassVar[bool] = True
    """Whether the loss corrects for samples of an older policy."""
    kl_options: ClassVar[tuple[str, ...]] = ("kl_estimator",)
    """What says nothing without a KL."""

    @model_validator(mode="after")
    def _shared_options_fit(self) -> Self:
        if self.constant is not None and self.normalise != "constant":
            raise ValueError("constant is used by `normalise: constant` only; write that, or remove constant")
        if self.compared_with() == "none" and self.scale != "none":
            raise ValueError(
                f"{self.name} has no baseline, so nothing to scale; remove scale or use reinforce_baseline"
            )
        if not self.has_ratio and self.epochs * self.mini_batches > 1:
            raise ValueError(
                f"{self.name} does not correct for samples of an older policy, so a batch is used once; "
                "write `epochs: 1` and `mini_batches: 1`, or use grpo"
            )
        if self.kl and self.kl_estimator == "k1" and not self.kl_is_weighted():
            raise ValueError(K1_IN_LOSS)
        if self.mismatch_cap is not None and (self.mismatch_floor or 0.0) >= self.mismatch_cap:
            raise ValueError("mismatch_floor is not below mismatch_cap; lower it")
        if self.group_size == 1 and self.compared_with() != "none":
            raise ValueError(
                f"{self.name} compares the samples of a problem, and with `group_size: 1` every advantage is 0; "
                "write for example `group_size: 8`"
            )
        return self

    @model_validator(mode="after")
    def _all_is_used(self) -> Self:
        if not self.kl:
            refuse_unused(self, self.kl_options, "with `kl: 0`", "write for example `kl: 0.04`")
        if self.entropy_target is None:
            where = "without entropy_target"
            refuse_unused(self, ("entropy_step", "entropy_max"), where, "write for example `entropy_target: 0.5`")
        if self.mismatch_cap is None:
            names = ("mismatch_floor", "mismatch_level", "mismatch_mask")
            refuse_unused(self, names, "without mismatch_cap", "write for example `mismatch_cap: 2`")
        if self.scale == "none":
            instead = "" if self.compared_with() == "none" else "write `scale: group`"
            refuse_unused(self, ("epsilon",), "with `scale: none`", instead)
        return self

    @property
    def needs_reference(self) -> bool:
        return self.kl > 0

    @property
    def needs_dead_groups(self) -> bool:
        return self.kl > 0 or self.entropy > 0 or self.entropy_target is not None

    @property
    def compares(self) -> bool:
        return self.compared_with() != "none"

    def kl_is_weighted(self) -> bool:
        """Whether the KL is more than a plain term of the loss: weighted by the ratio, or a part of the reward."""
        return False

    def compared_with(self) -> Baseline:
        """What a reward is compared with: nothing, the mean of its group, or the mean of the others there."""
        return "mean"

    def advantages(self, rewards: Sequence[np.ndarray]) -> list[np.ndarray]:
        from lemma.objectives.advantages import group_advantages

        sizes = [len(group) for group in rewards]
        found = group_advantages(
            np.concatenate([np.zeros(0), *rewards]),
            np.repeat(np.arange(len(sizes)), sizes),
            baseline=self.compared_with(),
            scale=self.scale,
            epsilon=self.epsilon,
            unbiased=self.unbiased,
        )
        return np.split(found, np.cumsum(sizes)[:-1]) if sizes else []

    def ratio_level(self) -> Level:
        """Whose ratio the surrogate sees: of a token, of a sequence as a mean, of a trajectory as a product."""
        return "token"

    def surrogate(self) -> Surrogate:
        raise AssertionError("an algorithm names its surrogate")

    def objective(self, max_tokens: int, memory: Memory) -> PolicyLoss:
        from lemma.objectives.policy_loss import KlTerm, PolicyLoss
        from lemma.objectives.policy_mismatch import MismatchWeight

        mismatch = None
        if self.mismatch_cap is not None:
            mismatch = MismatchWeight(self.mismatch_level, self.mismatch_cap, self.mismatch_floor, self.mismatch_mask)
        return PolicyLoss(
            self.surrogate(),
            level=self.ratio_level(),
            normalise=self.normalise,
            constant=self.constant or float(max_tokens),
            kl=KlTerm(self.kl, self.kl_estimator) if self.kl else None,
            entropy=self._entropy_weight(memory),
            mismatch=mismatch,
            watch_entropy=self.entropy_target is not None,
            name=self.name,
        )

    def observe(self, metrics: Mapping[str, float], memory: Memory) -> None:
        if self.entropy_target is None or "entropy" not in metrics:
            return
        seen = metrics["entropy"]
        step = self.entropy_step if seen <= self.entropy_target else -self.entropy_step
        weight = memory.numbers.get("entropy_weight", self.entropy) + step
        memory.numbers |= {"entropy_weight": min(max(weight, 0.0), self.entropy_max), "entropy_seen": seen}

    def _entropy_weight(self, memory: Memory) -> float:
        if self.entropy_target is None:
            return self.entropy
        is_low = memory.numbers.get("entropy_seen", 0.0) <= self.entropy_target
        return memory.numbers.get("entropy_weight", self.entropy) if is_low else 0.0


class RatioPolicyGradient(PolicyGradient):
    """A policy gradient whose loss looks at the ratio of the present policy to the one before the batch."""

    kl_by_ratio: bool = False
    """Multiply the estimate of the KL by the ratio, so that it holds for samples of the older policy."""
    top_entropy: float = Field(1.0, gt=0, le=1)
    """Learn from this share of the batch's tokens only, those of highest entropy."""
    off_policy_limit: float | None = Field(None, gt=0)
    """Leave out unwanted samples whose log-probability per token has fallen by more than this."""

    kl_options: ClassVar[tuple[str, ...]] = ("kl_estimator", "kl_by_ratio")

    def kl_is_weighted(self) -> bool:
        return self.kl_by_ratio

    @property
    def needs_dead_groups(self) -> bool:
        return super().needs_dead_groups or self.top_entropy < 1

    def objective(self, max_tokens: int, memory: Memory) -> PolicyLoss:
        base = super().objective(max_tokens, memory)
        return replace(
            base,
            kl=None if base.kl is None else replace(base.kl, by_ratio=self.kl_by_ratio),
            top_entropy=self.top_entropy,
            off_policy_limit=self.off_policy_limit,
        )


class ClippedPolicyGradient(RatioPolicyGradient):
    """A policy gradient that stops at the edge of a trust region, as PPO does."""

    clip: float | None = Field(0.2, gt=0)
    """The ratio counts down to 1 - clip and up to 1 + clip; null: without an end."""
    clip_high: float | None = Field(None, gt=0)
    """Another distance upwards. Default: the same as clip."""
    clip_cap: float | None = Field(None, gt=1)
    """Where the ratio ends for unwanted samples too (two-sided clipping), above 1 + clip_high."""

    @model_validator(mode="after")
    def _clips_fit(self) -> Self:
        if self.clip is None:
            if self.clip_high is not None or self.clip_cap is not None:
                raise ValueError(
                    "clip_high and clip_cap need clip; write for example `clip: 0.2`, or null for them too"
                )
        elif self.clip >= 1:
            raise ValueError("clip is a distance from 1 and below it; write for example 0.2")
        elif self.clip_cap is not None and self.clip_cap <= 1 + (self.clip_high or self.clip):
            raise ValueError("clip_cap lies within the clip and would undo it; write one above 1 + clip_high")
        return self

    def surrogate(self) -> Surrogate:
        from lemma.objectives.policy_surrogates import Clip, Unclipped

        return Unclipped() if self.clip is None else Clip.around(self.clip, self.clip_high, self.clip_cap)
