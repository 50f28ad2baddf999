"""CISPO (MiniMax, 2025): the weight is cut and not the token, so that rare, decisive tokens keep their gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from lemma.algorithms.policy_gradient import RatioPolicyGradient

if TYPE_CHECKING:
    from lemma.objectives.policy_surrogates import Surrogate


class Cispo(RatioPolicyGradient):
    """REINFORCE on older samples: log-probabilities weighted by the ratio, which ends at a cap."""

    name: Literal["cispo"] = "cispo"
    """Clipped importance weights."""
    scale: Literal["none", "group", "batch"] = "group"
    """Divide advantages by the standard deviation of the rewards: not at all, of the group, or of the whole batch."""
    normalise: Literal["token", "sequence", "constant"] = "token"
    """The loss is a mean over tokens, a mean over samples of the means over their tokens, or a mean over samples of
    sums divided by `constant`."""
    cap: float = Field(5.0, ge=1)
    """Largest ratio; 1 + 0.28 would be the upper clip of DAPO."""

    def surrogate(self) -> Surrogate:
        from lemma.objectives.policy_surrogates import CappedWeight

        return CappedWeight(self.cap)
