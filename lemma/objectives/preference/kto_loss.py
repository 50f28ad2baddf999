"""Kahneman-Tversky optimisation: single responses, each wanted or unwanted, against a reference point."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from lemma.core.types import Output, Scope
from lemma.objectives.objective import Loss, LossInputs
from lemma.objectives.preference.pair_pieces import distance_metric, reference_logprobs, sequence_logprobs


def reference_point(logprobs_B: torch.Tensor, reference_B: torch.Tensor) -> torch.Tensor:
    """An estimate of KL(policy || reference), from responses to other prompts: the mean log-ratio, at least 0."""
    if not len(logprobs_B):
        return torch.zeros((), dtype=logprobs_B.dtype)
    return (logprobs_B - reference_B).mean().clamp(min=0).detach()


@dataclass(frozen=True)
class KahnemanTversky:
    """Mean over responses of 1 - sigma(beta (r - z)) where wanted and 1 - sigma(beta (z - r)) where not, weighted.

    r is the log-ratio of a response and z the reference point `baseline`, a constant of the step. `apo_zero_unpaired`
    has none.
    """

    loss: Literal["kto", "apo_zero_unpaired"] = "kto"
    beta: float = 0.1
    wanted_weight: float = 1.0
    unwanted_weight: float = 1.0
    baseline: float = 0.0
    name: str = "kto"
    scope: Scope = "sequence"
    outputs: tuple[Output, ...] = ("logprobs",)

    def __call__(self, terms: LossInputs) -> Loss:
        value = self.per_response(terms).sum() / max(terms.totals.sequences, 1.0)
        sign_B = terms.fields["sign"]
        ratio_B = self._ratio(terms).detach()
        reward_B, logps_B = self.beta * ratio_B, sequence_logprobs(terms).detach()
        wanted_B = (sign_B > 0).to(reward_B.dtype)
        is_right_B = (sign_B * (ratio_B - self._point) > 0).to(reward_B.dtype)
        return Loss(
            value,
            {
                "rewards/chosen": ((reward_B * wanted_B).sum(), wanted_B.sum()),
                "rewards/rejected": ((reward_B * (1 - wanted_B)).sum(), (1 - wanted_B).sum()),
                "rewards/accuracies": (is_right_B.sum(), float(len(reward_B))),
                "logps/chosen": ((logps_B * wanted_B).sum(), wanted_B.sum()),
                "logps/rejected": ((logps_B * (1 - wanted_B)).sum(), (1 - wanted_B).sum()),
                "reference_point": (self._point * float(len(reward_B)), float(len(reward_B))),
            }
            | distance_metric(terms),
        )

    def per_response(self, terms: LossInputs) -> torch.Tensor:
        """The loss (B,) of each response, weighted by its class."""
        sign_B = terms.fields["sign"]
        weight_B = torch.where(sign_B > 0, torch.full_like(sign_B, self.wanted_weight), self.unwanted_weight)
        return weight_B * torch.sigmoid(-sign_B * self.beta * (self._ratio(terms) - self._point))

    @property
    def _point(self) -> float:
        return self.baseline if self.loss == "kto" else 0.0

    @staticmethod
    def _ratio(terms: LossInputs) -> torch.Tensor:
        return sequence_logprobs(terms) - reference_logprobs(terms)
