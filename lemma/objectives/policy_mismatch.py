"""Importance weights for tokens whose sampler differs slightly from the learner: same weights, but other kernels or
another precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from lemma.objectives.objective import Terms

LARGEST_LOG_RATIO = 60.0
"""A ratio beyond exp of this has no gradient; unbounded it could be infinite, and infinity times 0 is NaN."""


@dataclass(frozen=True)
class MismatchWeight:
    """old / behaviour, of each token or of each whole sequence.

    It is clipped to [`floor`, `cap`]; with `mask`, tokens or sequences outside are left out instead.
    """

    level: Literal["token", "sequence"] = "token"
    cap: float = 2.0
    floor: float | None = None
    mask: bool = False

    def __call__(self, terms: Terms, old_N: torch.Tensor) -> torch.Tensor:
        """Weights (N,), without gradient."""
        log_N = (old_N - terms.tokens["behaviour"]).detach()
        if self.level == "sequence":
            log_N = terms.per_sequence(log_N)[terms.sequence_N]
        weight_N = log_N.clamp(max=LARGEST_LOG_RATIO).exp()
        floor = 0.0 if self.floor is None else self.floor
        if self.mask:
            return torch.where((weight_N > self.cap) | (weight_N < floor), 0.0, weight_N)
        return weight_N.clamp(floor, self.cap)


def engine_logprobs(terms: Terms, old_N: torch.Tensor) -> torch.Tensor:
    """The engine's log-probability of each token over the whole vocabulary, like the learner's: if it sampled from a
    part of it, the log of the mass it kept is added back. Without an engine, the old policy's."""
    if "behaviour" not in terms.tokens:
        return old_N
    return terms.tokens["behaviour"] + terms.tokens.get("kept", 0.0)


def mismatch(terms: Terms, old_N: torch.Tensor) -> torch.Tensor:
    """Absolute difference of the engine's and the learner's log-probability of each sampled token."""
    gap_N = (old_N - engine_logprobs(terms, old_N)).detach().abs()
    return gap_N * (1.0 - terms.tokens["off"]) if "off" in terms.tokens else gap_N
