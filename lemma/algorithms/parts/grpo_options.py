"""Parts of GRPO: surrogates other than the clipped ratio, and rewards that are each normalised separately."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from lemma.algorithms.parts.loss_options import Level, MismatchCap
from lemma.algorithms.parts.policy_gradient import ClipOptions
from lemma.algorithms.parts.refusals import refuse_unused
from lemma.algorithms.parts.signals import compared, learns, numbered, split_like, write_advantages
from lemma.config import Options
from lemma.core.types import Group

if TYPE_CHECKING:
    from lemma.objectives.policy_surrogates import Surrogate


class SapoOptions(Options):
    """The gate 4 / t sigmoid(t (r - 1)) of SAPO: a larger t closes it sooner."""

    positive: float = Field(1.0, gt=0)
    """Temperature t for an advantage above 0."""
    negative: float = Field(1.05, gt=0)
    """Temperature t for an advantage of 0 or below."""


class VespoOptions(Options):
    """The weight w^k exp(l (1 - w)) of VESPO, where w is the ratio of the whole sample."""

    power_positive: float = Field(2.0, ge=0)
    """k for an advantage of 0 or above."""
    decay_positive: float = Field(3.0, ge=0)
    """l for an advantage of 0 or above."""
    power_negative: float = Field(3.0, ge=0)
    """k for a negative advantage."""
    decay_negative: float = Field(2.0, ge=0)
    """l for a negative advantage."""


class GainOptions(ClipOptions):
    """The surrogate of a token, and the level of its ratio."""

    gain: Literal["clip", "sapo", "vespo"] = "clip"
    """The surrogate objective of a token: the clipped ratio; a smooth gate instead of the clip (sapo); or the
    log-probability weighted by a smooth function of the whole sample's ratio (vespo)."""
    sapo: SapoOptions = SapoOptions()
    """The gate of `gain: sapo`."""
    vespo: VespoOptions = VespoOptions()
    """The weight of `gain: vespo`."""
    ratio: Level = "token"
    """Level of the importance ratio: each token's own; the turn's, a product over its tokens; or the whole sample's, as
    the geometric mean over its tokens (sequence) or their product (trajectory)."""
    mismatch_cap: MismatchCap = None

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
    def ratio_level(self) -> Level:
        return "trajectory" if self.gain == "vespo" else self.ratio

    def surrogate(self) -> Surrogate:
        from lemma.objectives.policy_surrogates import GammaWeight, SoftGate

        if self.gain == "sapo":
            return SoftGate(**self.sapo.model_dump())
        return GammaWeight(**self.vespo.model_dump()) if self.gain == "vespo" else self.clipped()


EachReward = Annotated[
    dict[str, float] | None,
    Field(
        description="Normalise each reward within its group, sum them with these weights, and normalise the sums over "
        "the batch (GDPO). Rewards of different scales then count according to their weights. Must name "
        "all rewards of the stage, with 0 for those that are only logged. Default: advantages of the "
        "weighted sum."
    ),
]


def check_weights(weights: Mapping[str, float] | None, scale: str) -> None:
    if weights is not None and not weights:
        raise ValueError("each_reward names no reward; write for example `each_reward: {accuracy: 1}`")
    if weights and scale != "group":
        raise ValueError("each_reward scales every reward by its group; remove scale or each_reward")


def assign_each(groups: Sequence[Group], weights: Mapping[str, float], epsilon: float) -> None:
    """Advantages of the weighted sums, over all groups."""
    from lemma.objectives.advantages import summed_advantages

    tables = [_table(group, weights) for group in groups]
    if tables:
        rows, numbers = np.concatenate(tables), numbered(tables)
        advantages = summed_advantages(rows, list(weights.values()), numbers, epsilon=epsilon)
        write_advantages(groups, split_like(tables, advantages))


def any_differs(group: Group, weights: Mapping[str, float], epsilon: float) -> bool:
    """Whether any reward with a weight gives a trained sample of this group an advantage."""
    columns = zip(_table(group, weights).T, weights.values(), strict=True)
    return any(
        learns(group, compared([column], "mean", scale="group", epsilon=epsilon)[0])
        for column, weight in columns
        if weight
    )


def _table(group: Group, weights: Mapping[str, float]) -> np.ndarray:
    """The named rewards of every episode (R, K); NaN where one does not apply."""
    table = [[episode[0].rewards.get(name, np.nan) for name in weights] for episode in group.episodes]
    return np.array(table, dtype=np.float64).reshape(len(table), len(weights))
