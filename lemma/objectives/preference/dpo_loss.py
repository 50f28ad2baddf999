"""Direct preference optimisation: the policy's log-ratios to a reference are the rewards of the two responses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from lemma.core.types import Output, Scope
from lemma.objectives.objective import Loss, LossInputs
from lemma.objectives.preference.dpo_losses import FORMULAS, SORTED, Divergence, Margins, score
from lemma.objectives.preference.pair_pieces import (
    Sides,
    distance_metric,
    negative_log_likelihood,
    nll_metric,
    pair_metrics,
    reference_logprobs,
    response_lengths,
    response_N,
)


@dataclass(frozen=True)
class DirectPreference:
    """Mean over pairs of the weighted sum of `losses`, plus `nll` times the NLL of the chosen responses.

    - `length_alpha` (LD-DPO): tokens beyond the length of the shorter response count this much.
    - `weighting` (WPO): a pair is weighted by how likely the policy is to generate both; reads `tokens["collision"]`,
      the log of the sum of squared probabilities at each token.
    - `running` (BCO): number and mean of the batch means of rewards so far. The shift of a step includes its own batch,
      which therefore must be seen whole. None: no shift.
    """

    losses: Mapping[str, float] = field(default_factory=lambda: {"sigmoid": 1.0})
    beta: float = 0.1
    label_smoothing: float = 0.0
    divergence: Divergence = "reverse_kl"
    divergence_alpha: float = 0.5
    tau: float = 0.05
    nll: float = 0.0
    length_alpha: float | None = None
    weighting: bool = False
    running: tuple[int, float] | None = None
    name: str = "dpo"
    outputs: tuple[Output, ...] = ("logprobs",)

    @property
    def scope(self) -> Scope:
        shifted = "bco" in self.losses and self.running is not None
        return "batch" if shifted or SORTED & self.losses.keys() else "pair"

    def __call__(self, terms: LossInputs) -> Loss:
        sides = Sides(terms)
        margins = self._margins(terms, sides)
        value = self._pairs(terms, sides, margins).sum() / max(terms.totals.groups, 1.0)
        if self.nll:
            value = value + self.nll * negative_log_likelihood(terms)
        chosen, rejected = margins.chosen_reward, margins.rejected_reward
        metrics = pair_metrics(chosen, rejected, margins.chosen, margins.rejected)
        both = (chosen.detach() + rejected.detach()).sum()
        return Loss(
            value,
            metrics | nll_metric(terms) | distance_metric(terms) | {"rewards/mean": (both, 2.0 * sides.count)},
        )

    def per_pair(self, terms: LossInputs) -> torch.Tensor:
        """The loss (U,) of each pair, without the NLL term."""
        sides = Sides(terms)
        return self._pairs(terms, sides, self._margins(terms, sides))

    def _pairs(self, terms: LossInputs, sides: Sides, margins: Margins) -> torch.Tensor:
        assert not (self.weighting and SORTED & self.losses.keys()), "a rank has no pair, and so no weight"
        pairs_U = torch.zeros_like(margins.chosen)
        for name, weight in self.losses.items():
            pairs_U = pairs_U + weight * FORMULAS[name](margins)
        return pairs_U * self._weights(terms, sides) if self.weighting else pairs_U

    def _margins(self, terms: LossInputs, sides: Sides) -> Margins:
        """Log-probabilities of both sides of each pair under policy and reference."""
        kept_N = response_N(terms) * self._length_weights(terms, sides)
        chosen, rejected = sides.split(terms.per_sequence(terms.logprobs_N * kept_N))
        if "reference" in terms.tokens:
            ref_chosen, ref_rejected = sides.split(terms.per_sequence(terms.tokens["reference"] * kept_N))
        else:
            ref_chosen, ref_rejected = sides.split(reference_logprobs(terms))
        chosen_length, rejected_length = sides.split(response_lengths(terms))
        mean = torch.cat([chosen - ref_chosen, rejected - ref_rejected]).detach().mean() * self.beta
        return Margins(
            chosen=chosen,
            rejected=rejected,
            ref_chosen=ref_chosen,
            ref_rejected=ref_rejected,
            chosen_score=score(chosen - ref_chosen, self.divergence, self.divergence_alpha),
            rejected_score=score(rejected - ref_rejected, self.divergence, self.divergence_alpha),
            chosen_length=chosen_length.clamp(min=1),
            rejected_length=rejected_length.clamp(min=1),
            beta=self.beta,
            smoothing=self.label_smoothing,
            tau=self.tau,
            shift=0.0 if self.running is None else _next_mean(*self.running, mean),
        )

    def _length_weights(self, terms: LossInputs, sides: Sides) -> torch.Tensor:
        """1 for tokens within the length that both responses of a pair have, `length_alpha` beyond it."""
        response = response_N(terms)
        if self.length_alpha is None:
            return torch.ones_like(response)
        shared_U = torch.minimum(*sides.split(terms.per_sequence(response)))
        lengths_B = terms.per_sequence(response)
        before_B = lengths_B.cumsum(0) - lengths_B
        position_N = response.cumsum(0) - before_B[terms.sequence_N]
        is_shared_N = position_N <= shared_U[sides.place_B][terms.sequence_N]
        return torch.where(is_shared_N, torch.ones_like(response), self.length_alpha)

    def _weights(self, terms: LossInputs, sides: Sides) -> torch.Tensor:
        """exp of the mean of log p - log sum p^2 over the tokens of each response, multiplied over the pair."""
        aligned_N = (terms.logprobs_N.detach() - terms.tokens["collision"]) * response_N(terms)
        chosen, rejected = sides.split(terms.per_sequence(aligned_N) / response_lengths(terms))
        return torch.exp(chosen + rejected)


def _next_mean(count: int, mean: float, new: torch.Tensor) -> torch.Tensor:
    """The mean of `count` values and one more."""
    return mean + (new - mean) / (count + 1)
