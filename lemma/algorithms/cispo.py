"""CISPO (MiniMax, 2025): the weight is clipped and not the token, so that rare but decisive tokens keep their gradient.

A = (R - mean of the group) / (deviation of the group + epsilon)
loss = - mean over all tokens of min(r, cap) A log p, without a gradient through min(r, cap)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from lemma.algorithms.parts.loss_options import Normalise, Scale
from lemma.algorithms.parts.policy_gradient import PolicyGradient, RatioOptions

if TYPE_CHECKING:
    from lemma.objectives.policy_loss import CappedWeight


class Cispo(RatioOptions, PolicyGradient):
    """REINFORCE on older samples: log-probabilities weighted by the ratio, up to a cap."""

    name: Literal["cispo"] = "cispo"
    """Clipped importance weights."""
    scale: Scale = "group"
    normalise: Normalise = "token"
    cap: float = Field(5.0, ge=1)
    """Maximum ratio; DAPO's upper clip would be 1.28."""

    def surrogate(self) -> CappedWeight:
        from lemma.objectives.policy_loss import CappedWeight

        return CappedWeight(self.cap)
