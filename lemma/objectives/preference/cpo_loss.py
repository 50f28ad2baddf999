"""Contrastive preference optimisation and SimPO: pairs without a reference, regularised by an NLL term or by length
normalisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from lemma.core.types import Output, Scope
from lemma.objectives.objective import Loss, LossInputs
from lemma.objectives.preference.dpo_losses import smoothed
from lemma.objectives.preference.pair_pieces import (
    Sides,
    negative_log_likelihood,
    nll_metric,
    pair_metrics,
    sequence_logprobs,
)


@dataclass(frozen=True)
class ContrastivePreference:
    """Mean over pairs of a loss on d = s_w - s_l, plus `nll` times the NLL of the chosen responses.

    s is the log-probability of a response, for `ipo` and `simpo` its mean over tokens. With `alpha` (AlphaPO) it is (1
    - p^-alpha) / alpha instead. SimPO's target is d > gamma / beta.
    """

    loss: Literal["sigmoid", "hinge", "ipo", "simpo"] = "sigmoid"
    beta: float = 0.1
    gamma: float = 0.0
    label_smoothing: float = 0.0
    alpha: float = 0.0
    nll: float = 0.0
    name: str = "cpo"
    scope: Scope = "pair"
    outputs: tuple[Output, ...] = ("logprobs",)

    def __call__(self, terms: LossInputs) -> Loss:
        sides = Sides(terms)
        chosen_logps, rejected_logps = sides.split(self._logprobs(terms))
        chosen, rejected = self._score(chosen_logps), self._score(rejected_logps)
        value = self._pairs(chosen - rejected).sum() / max(terms.totals.groups, 1.0)
        if self.nll:
            value = value + self.nll * negative_log_likelihood(terms)
        metrics = pair_metrics(self.beta * chosen, self.beta * rejected, chosen_logps, rejected_logps)
        return Loss(value, metrics | nll_metric(terms))

    def per_pair(self, terms: LossInputs) -> torch.Tensor:
        """The loss (U,) of each pair, without the NLL term."""
        chosen, rejected = (self._score(logps) for logps in Sides(terms).split(self._logprobs(terms)))
        return self._pairs(chosen - rejected)

    def _logprobs(self, terms: LossInputs) -> torch.Tensor:
        return sequence_logprobs(terms, average=self.loss in ("ipo", "simpo"))

    def _score(self, logps: torch.Tensor) -> torch.Tensor:
        return logps if self.alpha == 0 else -torch.expm1(-self.alpha * logps) / self.alpha

    def _pairs(self, d: torch.Tensor) -> torch.Tensor:
        if self.loss == "hinge":
            return F.relu(1 - self.beta * d)
        if self.loss == "ipo":
            return (d - 1 / (2 * self.beta)) ** 2
        return smoothed(self.beta * d - (self.gamma if self.loss == "simpo" else 0.0), self.label_smoothing)
