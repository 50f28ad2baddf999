"""Objectives made for the tests: one for each scope that the registry may not have yet."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from lemma.core.types import Output, Scope
from lemma.objectives import Loss, LossInputs


@dataclass(frozen=True)
class WeightedTokens:
    """An advantage for every token, and a bonus for entropy."""

    name: str = "toy_token"
    scope: Scope = "token"
    outputs: tuple[Output, ...] = ("logprobs", "entropy")

    def __call__(self, terms: LossInputs) -> Loss:
        gain = (terms.tokens["advantage"] * terms.logprobs_N.exp()).sum() + 0.3 * terms.entropy_N.sum()
        count = float(len(terms.logprobs_N))
        return Loss(-gain / terms.totals.tokens, {"entropy": (terms.entropy_N.detach().sum(), count)})


@dataclass(frozen=True)
class LogisticPairs:
    """The logistic loss of the difference between the two sequences of a pair."""

    name: str = "toy_pair"
    scope: Scope = "pair"
    outputs: tuple[Output, ...] = ("logprobs",)

    def __call__(self, terms: LossInputs) -> Loss:
        _, place_B = torch.unique(terms.group_B, return_inverse=True)
        signed_B = terms.fields["sign"] * terms.per_sequence(terms.logprobs_N)
        margin_U = signed_B.new_zeros(int(place_B.max()) + 1).index_add(0, place_B, signed_B)
        won = (margin_U > 0).double().sum()
        return Loss(F.softplus(-0.1 * margin_U).sum() / terms.totals.groups, {"won": (won, float(len(margin_U)))})


@dataclass(frozen=True)
class SpreadOfBatch:
    """The weighted spread of the sequences about their common mean, and a curved function of the mean entropy."""

    name: str = "toy_batch"
    scope: Scope = "batch"
    outputs: tuple[Output, ...] = ("logprobs", "entropy")

    def __call__(self, terms: LossInputs) -> Loss:
        mean_B = terms.per_sequence(terms.logprobs_N) / terms.lengths_B()
        spread = (terms.fields["weight"] * (mean_B - mean_B.mean()) ** 2).mean()
        entropy = terms.entropy_N.mean()
        return Loss(spread + entropy**2, {"spread": (spread.detach(), 1.0)})


TOYS = {toy.name: toy for toy in (WeightedTokens(), LogisticPairs(), SpreadOfBatch())}
