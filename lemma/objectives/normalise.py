"""The share of each token in a loss: three divisors, each an explicit count over the whole step."""

from __future__ import annotations

from typing import Literal

import torch

from lemma.objectives.objective import Terms

Normalise = Literal["token", "sequence", "constant"]


def token_weights(terms: Terms, normalise: Normalise, constant: float = 1.0) -> torch.Tensor:
    """Weights (N,) by which a sum over tokens becomes

    - `token`: a mean over all trained tokens of the step;
    - `sequence`: a mean over sequences of the means over their tokens;
    - `constant`: a mean over sequences of their sums divided by a constant.
    """
    totals = terms.totals
    ones_N = torch.ones_like(terms.logprobs_N)
    if normalise == "token":
        return ones_N / max(totals.tokens, 1.0)
    if normalise == "sequence":
        return ones_N / terms.lengths_B()[terms.sequence_N] / max(totals.sequences, 1.0)
    return ones_N / (constant * max(totals.sequences, 1.0))
