"""LUFFY's reshaping of ratios and probabilities: the weight of a token, given its probability.

`p_div_p` is p / (p + gamma): its gradient with respect to log p, gamma p / (p + gamma)^2, is largest at p = gamma, so
that a teacher's tokens are learnt even if they are unlikely under the policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from lemma.core.errors import UserError, nearest

ShapeKind = Literal["no_reshape", "logp", "p_logp", "square_root", "pow", "p_div_p"]


@dataclass(frozen=True)
class Shaping:
    """A reshaping and its constants: `weight` for `logp` and `p_logp`, `power` for `pow`, `gamma` for `p_div_p`."""

    kind: ShapeKind = "no_reshape"
    weight: float = 0.1
    power: float = 0.5
    gamma: float = 0.1

    def __post_init__(self) -> None:
        if self.kind not in get_args(ShapeKind):
            raise UserError(f"there is no reshaping '{self.kind}'", fix=nearest(self.kind, get_args(ShapeKind)))

    def of_ratio(self, logprobs: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        """The reshaped ratio of an on-policy token; `p_div_p` reshapes both probabilities."""
        d = logprobs - old
        if self.kind == "logp":
            return d
        if self.kind == "p_logp":
            return d.exp() + self.weight * d
        if self.kind == "p_div_p":
            return self._share(logprobs) / self._share(old)
        return (self._exponent * d).exp()

    def of_probability(self, logprobs: torch.Tensor) -> torch.Tensor:
        """The reshaped probability of an off-policy token, whose behaviour probability is taken as 1."""
        if self.kind == "logp":
            return self.weight * logprobs
        if self.kind == "p_logp":
            return self.weight * logprobs + logprobs.exp()
        if self.kind == "p_div_p":
            return self._share(logprobs)
        return (self._exponent * logprobs).exp()

    @property
    def _exponent(self) -> float:
        return {"square_root": 0.5, "pow": self.power}.get(self.kind, 1.0)

    def _share(self, logprobs: torch.Tensor) -> torch.Tensor:
        p = logprobs.exp()
        return p / (p + self.gamma)
