"""The weight of each token in a loss: three divisors, each an explicit count over the whole step."""

from __future__ import annotations

from typing import Literal

import torch

from lemma.objectives.objective import Terms

Normalise = Literal["token", "sequence", "constant"]


def divisors(terms: Terms, normalise: Normalise, constant: float = 1.0) -> tuple[torch.Tensor | None, float]:
    """What the sum over each sequence (B,) is divided by, None where by nothing, and then the sum over all of them:

    - `token`: a mean over all trained tokens of the step;
    - `sequence`: a mean over sequences of the means over their tokens; those of one episode are one;
    - `constant`: a mean over sequences of their sums divided by a constant.
    """
    sequences = max(terms.totals.sequences, 1.0)
    if normalise == "token":
        return None, max(terms.totals.tokens, 1.0)
    return (terms.said_B(), sequences) if normalise == "sequence" else (None, constant * sequences)


def token_weights(terms: Terms, normalise: Normalise, constant: float = 1.0) -> torch.Tensor:
    """The weight (N,) of each token such that a weighted sum over tokens is what `divisors` says."""
    of_sequence_B, of_all = divisors(terms, normalise, constant)
    ones_N = torch.ones_like(terms.logprobs_N)
    if of_sequence_B is not None:
        ones_N = ones_N / of_sequence_B[terms.sequence_N]
    return ones_N / of_all
