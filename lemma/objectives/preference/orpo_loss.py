"""Odds-ratio preference optimisation: imitate the chosen response, and push its odds above those of the rejected."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from lemma.core.types import Output, Scope
from lemma.objectives.objective import Loss, LossInputs
from lemma.objectives.preference.pair_pieces import (
    Sides,
    negative_log_likelihood,
    nll_metric,
    pair_metrics,
    sequence_logprobs,
)

# A response of probability 1 has infinite odds and no gradient; this caps the certainty.
MOST_CERTAIN = -1e-12


@dataclass(frozen=True)
class OddsRatio:
    """NLL of what `tokens["nll"]` marks - beta x mean over pairs of log sigma(log odds_w - log odds_l).

    The odds of a response are p / (1 - p) with p the geometric mean of its tokens' probabilities.
    """

    beta: float = 0.1
    name: str = "orpo"
    scope: Scope = "pair"
    outputs: tuple[Output, ...] = ("logprobs",)

    def __call__(self, terms: LossInputs) -> Loss:
        sides = Sides(terms)
        chosen, rejected = sides.split(sequence_logprobs(terms, average=True))
        log_odds = _log_odds(chosen) - _log_odds(rejected)
        ratio = F.logsigmoid(log_odds)
        value = negative_log_likelihood(terms) - self.beta * ratio.sum() / max(terms.totals.groups, 1.0)
        metrics = pair_metrics(self.beta * chosen, self.beta * rejected, chosen, rejected)
        count = float(sides.count)
        odds = {"log_odds": (log_odds.detach().sum(), count), "log_sigmoid_odds": (ratio.detach().sum(), count)}
        return Loss(value, metrics | odds | nll_metric(terms))


def _log_odds(logp: torch.Tensor) -> torch.Tensor:
    """log p - log(1 - p), accurate for p near 0 and near 1, by a different formula on each side of p = 1/2."""
    logp = logp.clamp(max=MOST_CERTAIN)
    near_zero = logp < -0.6931471805599453
    small, large = torch.where(near_zero, logp, -1.0), torch.where(near_zero, -0.5, logp)
    return logp - torch.where(near_zero, torch.log1p(-small.exp()), torch.log(-torch.expm1(large)))
