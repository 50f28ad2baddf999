"""Options shared by several algorithms, each with its range and description.

An algorithm with another default redeclares the field: `scale: Scale = "group"`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from lemma.config import Options

Baseline = Literal["none", "mean", "leave_one_out"]
Level = Literal["token", "turn", "sequence", "trajectory"]

GroupSize = Annotated[int, Field(ge=1, description="Samples per problem.")]
Epochs = Annotated[int, Field(ge=1, description="Passes over each batch of rollouts.")]

Scale = Annotated[
    Literal["none", "group", "batch"],
    Field(
        description="Divide advantages by the standard deviation of the rewards: not at all, the group's, or the "
        "whole batch's."
    ),
]


def _names_some(weights: dict[str, float] | None) -> dict[str, float] | None:
    if weights is not None and not weights:
        raise ValueError("each_reward names no reward; write for example `each_reward: {accuracy: 1}`")
    return weights


EachReward = Annotated[
    dict[str, float] | None,
    Field(
        description="Normalise each reward within its group, sum them with these weights, and normalise the sums over "
        "the batch (GDPO). Rewards of different scales then count according to their weights. Must name "
        "all rewards of the stage, with 0 for those that are only logged. Default: advantages of the "
        "weighted sum."
    ),
    AfterValidator(_names_some),
]
LARGEST_EPSILON = 0.05


def _is_small(epsilon: float) -> float:
    if epsilon > LARGEST_EPSILON:
        raise ValueError(
            f"{epsilon:g} is too much to add to a standard deviation; the clip range of the ratio, which others call "
            f"epsilon, is written `clip: {epsilon:g}` here"
        )
    return epsilon


Epsilon = Annotated[
    float,
    Field(ge=0, description="Added to the standard deviation before dividing by it."),
    AfterValidator(_is_small),
]
Normalise = Annotated[
    Literal["token", "sequence", "constant"],
    Field(
        description="How token losses are averaged: over all tokens; over each sample's tokens, then over samples; or "
        "summed per sample and divided by `constant`, then averaged over samples."
    ),
]
Constant = Annotated[
    float | None, Field(gt=0, description="Divisor for `normalise: constant`. Default: the maximum response length.")
]

Clip = Annotated[
    float | None,
    Field(gt=0, lt=1, description="The ratio is clipped to the range from 1 - clip to 1 + clip; null: no clipping."),
]
ClipHigh = Annotated[
    float | None, Field(gt=0, description="Upper clip range, if different. Default: the same as clip.")
]

KlWeight = Annotated[
    float,
    Field(
        ge=0, description="Weight of the KL to the model that the stage started from. At 0 no reference model is kept."
    ),
]
KlEstimator = Annotated[
    Literal["k1", "k2", "k3", "abs", "mse", "low_var_kl"], Field(description="Estimator of the KL per token.")
]
EntropyWeight = Annotated[float, Field(ge=0, description="Weight of the entropy bonus, a mean over tokens.")]
MismatchCap = Annotated[
    float | None,
    Field(
        gt=0,
        description="Weight the policy's own tokens by their probability under the learner over that under the engine "
        "that sampled them (truncated importance sampling), capped at this value; 2 is usual. Default: no "
        "such weight.",
    ),
]

LabelSmoothing = Annotated[float, Field(ge=0, lt=0.5, description="Assumed share of labels that are swapped.")]
NllWeight = Annotated[float, Field(ge=0, description="Weight of the mean NLL of the chosen responses.")]


def check_divisor(normalise: str, constant: float | None) -> None:
    if constant is not None and normalise != "constant":
        raise ValueError("constant is used by `normalise: constant` only; write that, or remove constant")


def check_compared(name: str, group_size: int) -> None:
    if group_size == 1:
        raise ValueError(
            f"{name} compares the samples of a problem, and with `group_size: 1` every advantage is 0; "
            "write for example `group_size: 8`"
        )


def check_kl_in_loss(kl: float, estimator: str) -> None:
    if kl and estimator == "k1":
        raise ValueError(
            "the gradient of k1 in a loss is 0 on average, so the KL would have no effect; write `kl_estimator: k3`"
        )


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
