"""The options of policy gradients, and the loss that they define. An algorithm adds its advantage and its surrogate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from lemma.algorithms.algorithm import Algorithm, AlgorithmState
from lemma.algorithms.parts import loss_options as shared
from lemma.algorithms.parts.advantages import compared, learns, rewards_of, write_advantages
from lemma.config import Options
from lemma.config.options import refuse_unused
from lemma.core.types import Group

if TYPE_CHECKING:
    from lemma.objectives.policy_loss import PolicyLoss, Surrogate


class RatioOptions(Options):
    """Options of losses that use the ratio of the current policy to the one before the batch."""

    kl_by_ratio: bool = False
    """Multiply the KL estimate by the ratio, so that it is also correct for samples of the old policy."""
    top_entropy: float = Field(1.0, gt=0, le=1)
    """Train only on this share of the batch's tokens, those with the highest entropy."""
    off_policy_limit: float | None = Field(None, gt=0)
    """Mask samples with negative advantage whose log-probability per token has fallen by more than this since they were
    sampled."""


class ClipOptions(Options):
    """The trust region of PPO: the ratio is clipped."""

    clip: shared.Clip = 0.2
    clip_high: shared.ClipHigh = None
    clip_cap: float | None = Field(None, gt=1)
    """Upper limit on the ratio for negative advantages as well (two-sided clipping); must be above 1 + clip_high."""

    @model_validator(mode="after")
    def _clips_fit(self) -> Self:
        if self.clip is None and (self.clip_high is not None or self.clip_cap is not None):
            raise ValueError("clip_high and clip_cap need clip; write for example `clip: 0.2`, or null for them too")
        if self.clip is not None and self.clip_cap is not None and self.clip_cap <= 1 + (self.clip_high or self.clip):
            raise ValueError("clip_cap lies within the clip and would undo it; write one above 1 + clip_high")
        return self

    def surrogate(self) -> Surrogate:
        """min(r A, clip(r) A), or r A without a clip."""
        from lemma.objectives.policy_loss import Clip, Unclipped

        return Unclipped() if self.clip is None else Clip.around(self.clip, self.clip_high, self.clip_cap)


class GainOptions(ClipOptions):
    """The surrogate of a token, and the level of its ratio."""

    gain: Literal["clip", "sapo", "vespo"] = "clip"
    """The surrogate objective of a token: the clipped ratio; a smooth gate instead of the clip (sapo); or the
    log-probability weighted by a smooth function of the whole sample's ratio (vespo)."""
    sapo: shared.SapoOptions = shared.SapoOptions()
    """The gate of `gain: sapo`."""
    vespo: shared.VespoOptions = shared.VespoOptions()
    """The weight of `gain: vespo`."""
    ratio: shared.Level = "token"
    """Level of the importance ratio: each token's own; the turn's, a product over its tokens; or the whole sample's, as
    the geometric mean over its tokens (sequence) or their product (trajectory)."""
    mismatch_cap: shared.MismatchCap = None

    @model_validator(mode="after")
    def _gain_fits(self) -> Self:
        if self.gain != "clip" and (self.clip != 0.2 or self.clip_high is not None or self.clip_cap is not None):
            raise ValueError(f"{self.gain} does not clip; remove clip, clip_high and clip_cap")
        for name in ("sapo", "vespo"):
            if self.gain != name:
                refuse_unused(self, (name,), f"with `gain: {self.gain}`", f"write `gain: {name}`")
        if self.gain == "vespo" and self.ratio in ("sequence", "turn"):
            raise ValueError("vespo weights by the product of a sample's ratios; write `ratio: trajectory`")
        if self.gain == "vespo" and self.mismatch_cap is not None:
            raise ValueError("vespo already weights whole samples; remove mismatch_cap")
        return self

    @property
    def ratio_level(self) -> shared.Level:
        return "trajectory" if self.gain == "vespo" else self.ratio

    def surrogate(self) -> Surrogate:
        from lemma.objectives.policy_loss import GammaWeight, SoftGate

        if self.gain == "sapo":
            return SoftGate(**self.sapo.model_dump())
        return GammaWeight(**self.vespo.model_dump()) if self.gain == "vespo" else super().surrogate()


class PolicyGradient(Algorithm):
    """An advantage for every sample, and a loss that makes tokens of better samples more likely."""

    scale: shared.Scale = "none"
    epsilon: shared.Epsilon = 1e-6
    normalise: shared.Normalise = "sequence"
    constant: shared.Constant = None
    kl: shared.KlWeight = 0.0
    kl_estimator: shared.KlEstimator = "k3"
    entropy: shared.EntropyWeight = 0.0
    entropy_target: float | None = Field(None, gt=0)
    """Target entropy in nats per token: after each step the bonus weight is raised if the entropy is below it and
    lowered otherwise; above it there is no bonus."""
    entropy_step: float = Field(0.005, gt=0)
    """How much `entropy_target` changes the weight per step."""
    entropy_max: float = Field(1.0, gt=0)
    """Maximum weight that `entropy_target` can reach."""
    mismatch_cap: shared.MismatchCap = None
    mismatch_floor: float | None = Field(None, ge=0)
    """Minimum mismatch weight."""
    mismatch_level: Literal["token", "sequence"] = "token"
    """Whether mismatch weights are per token or per sample."""
    mismatch_mask: bool = False
    """Mask tokens or samples whose weight is outside floor and cap, instead of clipping the weight."""

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        shared.check_divisor(self.normalise, self.constant)
        if not self.compares and self.scale != "none":
            raise ValueError(
                f"{self.name} has no baseline, so nothing to scale; remove scale or use reinforce_baseline"
            )
        if not self.kl_is_weighted:
            shared.check_kl_in_loss(self.kl, self.kl_estimator)
        if self.mismatch_cap is not None and (self.mismatch_floor or 0.0) >= self.mismatch_cap:
            raise ValueError("mismatch_floor is not below mismatch_cap; lower it")
        if self.compares:
            shared.check_compared(self.name, self.group_size)
        return self

    @model_validator(mode="after")
    def _all_is_used(self) -> Self:
        if not self.kl:
            names = ("kl_estimator", *(["kl_by_ratio"] if isinstance(self, RatioOptions) else []))
            refuse_unused(self, names, "with `kl: 0`", "write for example `kl: 0.04`")
        if self.entropy_target is None:
            where = "without entropy_target"
            refuse_unused(self, ("entropy_step", "entropy_max"), where, "write for example `entropy_target: 0.5`")
        if self.mismatch_cap is None:
            names = ("mismatch_floor", "mismatch_level", "mismatch_mask")
            refuse_unused(self, names, "without mismatch_cap", "write for example `mismatch_cap: 2`")
        if self.scale == "none":
            refuse_unused(self, ("epsilon",), "with `scale: none`", "write `scale: group`" if self.compares else "")
        return self

    @property
    def needs_old(self) -> bool:
        return self.updates > 1 or self.kl_in_reward

    @property
    def needs_reference(self) -> bool:
        return self.kl > 0 or self.kl_in_reward

    @property
    def scores_first(self) -> bool:
        return self.needs_critic or self.kl_in_reward

    @property
    def needs_all_groups(self) -> bool:
        picks_tokens = isinstance(self, RatioOptions) and self.top_entropy < 1
        pays_for_entropy = self.gives_entropy_bonus or self.entropy_target is not None
        return self.kl > 0 or self.kl_in_reward or pays_for_entropy or picks_tokens

    @property
    def gives_entropy_bonus(self) -> bool:
        return self.entropy > 0

    @property
    def kl_in_reward(self) -> bool:
        """Whether a KL to the reference is subtracted from rewards."""
        return False

    @property
    def kl_is_weighted(self) -> bool:
        """Whether the KL is more than a plain loss term: weighted by the ratio, or part of the reward."""
        return isinstance(self, RatioOptions) and self.kl_by_ratio

    def advantages(self, rewards: Sequence[np.ndarray]) -> list[np.ndarray]:
        """One advantage for each sample, from the rewards of each group: less their mean, scaled as the options say."""
        return compared(rewards, "mean", scale=self.scale, epsilon=self.epsilon)

    def assign(self, groups: Sequence[Group], memory: AlgorithmState) -> None:
        write_advantages(groups, self.advantages([rewards_of(group) for group in groups]))

    def has_signal(self, group: Group) -> bool:
        return learns(group, self.advantages([rewards_of(group)])[0])

    def surrogate(self) -> Surrogate:
        """What a token gains."""
        raise AssertionError("a policy gradient defines its surrogate or its objective")

    def objective(self, max_tokens: int, memory: AlgorithmState) -> PolicyLoss:
        """The loss of the surrogate with everything that the options add to it."""
        from lemma.objectives.policy_loss import KlTerm, MismatchWeight, PolicyLoss

        by_ratio = self if isinstance(self, RatioOptions) else RatioOptions()
        mismatch = None
        if self.mismatch_cap is not None:
            mismatch = MismatchWeight(self.mismatch_level, self.mismatch_cap, self.mismatch_floor, self.mismatch_mask)
        return PolicyLoss(
            self.surrogate(),
            level=self.ratio_level,
            normalise=self.normalise,
            constant=self.constant or float(max_tokens),
            kl=KlTerm(self.kl, self.kl_estimator, by_ratio.kl_by_ratio) if self.kl else None,
            entropy=self.entropy if self.entropy_target is None else self._steered_entropy(memory),
            mismatch=mismatch,
            top_entropy=by_ratio.top_entropy,
            off_policy_limit=by_ratio.off_policy_limit,
            watch_entropy=self.entropy_target is not None,
            name=self.name,
        )

    def observe(self, metrics: Mapping[str, float], memory: AlgorithmState) -> None:
        if self.entropy_target is None or "entropy" not in metrics:
            return
        seen = metrics["entropy"]
        step = self.entropy_step if seen <= self.entropy_target else -self.entropy_step
        weight = memory.numbers.get("entropy_weight", self.entropy) + step
        memory.numbers |= {"entropy_weight": min(max(weight, 0.0), self.entropy_max), "entropy_seen": seen}

    def _steered_entropy(self, memory: AlgorithmState) -> float:
        assert self.entropy_target is not None
        is_low = memory.numbers.get("entropy_seen", 0.0) <= self.entropy_target
        return memory.numbers.get("entropy_weight", self.entropy) if is_low else 0.0
