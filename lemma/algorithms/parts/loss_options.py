"""Options that several algorithms have, each with its range and its help, and the terms of a loss that they make.

An algorithm that wants another default writes the field again: `scale: Scale = "group"`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field

if TYPE_CHECKING:
    from lemma.objectives.policy_loss import KlTerm
    from lemma.objectives.policy_mismatch import MismatchWeight
    from lemma.objectives.policy_surrogates import Surrogate

Baseline = Literal["none", "mean", "leave_one_out"]
Level = Literal["token", "turn", "sequence", "trajectory"]

GroupSize = Annotated[int, Field(ge=1, description="Samples per problem.")]
Epochs = Annotated[int, Field(ge=1, description="Passes over each batch of rollouts.")]

Scale = Annotated[
    Literal["none", "group", "batch"],
    Field(
        description="Divide advantages by the standard deviation of the rewards: not at all, of the group, or of the "
        "whole batch."
    ),
]
LARGEST_EPSILON = 0.05


def _is_small(epsilon: float) -> float:
    if epsilon > LARGEST_EPSILON:
        raise ValueError(
            f"{epsilon:g} is too much to add to a standard deviation; the range of the ratio, which others call "
            f"epsilon, is `clip: {epsilon:g}` here"
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
        description="The loss is a mean over tokens, a mean over samples of the means over their tokens, or a mean "
        "over samples of sums divided by `constant`."
    ),
]
Constant = Annotated[
    float | None, Field(gt=0, description="Divisor for `normalise: constant`. Default: the longest response.")
]

Clip = Annotated[
    float | None,
    Field(gt=0, lt=1, description="The ratio is clipped to 1 - clip and 1 + clip; null: it is not clipped."),
]
ClipHigh = Annotated[float | None, Field(gt=0, description="Another distance upwards. Default: the same as clip.")]

KlWeight = Annotated[
    float,
    Field(ge=0, description="Weight of the KL to the model the stage began with. At 0 no reference model is held."),
]
KlEstimator = Annotated[
    Literal["k1", "k2", "k3", "abs", "mse", "low_var_kl"], Field(description="How the KL of a token is estimated.")
]
EntropyWeight = Annotated[float, Field(ge=0, description="Weight of a bonus for the mean entropy of tokens.")]
MismatchCap = Annotated[
    float | None,
    Field(
        gt=0,
        description="Weigh the policy's own tokens by how likely the learner finds them relative to the engine that "
        "sampled them, at most by this much; 2 is usual. Default: no such weight.",
    ),
]

LabelSmoothing = Annotated[float, Field(ge=0, lt=0.5, description="Share of the labels that may be swapped.")]
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
            "the gradient of k1 in a loss is 0 on average, so that the KL would cost nothing; write `kl_estimator: k3`"
        )


def clipped(clip: float | None, high: float | None = None, cap: float | None = None) -> Surrogate:
    """min(r A, clip(r) A), or r A without a clip."""
    from lemma.objectives.policy_surrogates import Clip as AtEdges
    from lemma.objectives.policy_surrogates import Unclipped

    return Unclipped() if clip is None else AtEdges.around(clip, high, cap)


def kl_term(weight: float, estimator: KlEstimator, by_ratio: bool = False) -> KlTerm | None:
    """The KL to the reference; nothing without a weight."""
    from lemma.objectives.policy_loss import KlTerm

    return KlTerm(weight, estimator, by_ratio) if weight else None


def mismatch_weight(
    cap: float | None,
    floor: float | None = None,
    level: Literal["token", "sequence"] = "token",
    mask: bool = False,
) -> MismatchWeight | None:
    """Weights of old / behaviour; nothing without a cap."""
    from lemma.objectives.policy_mismatch import MismatchWeight

    return None if cap is None else MismatchWeight(level, cap, floor, mask)
