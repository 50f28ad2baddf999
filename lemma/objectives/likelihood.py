"""Negative log-likelihood of demonstrations, with the three usual divisors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lemma.core.types import Scope
from lemma.objectives.objective import Loss, Ratio, Terms
from lemma.objectives.policy_mismatch import mismatch


@dataclass(frozen=True)
class NegativeLogLikelihood:
    """-sum w log p. The weight w of a token is

    - `token`: 1 / all trained tokens of the step;
    - `sequence`: 1 / (trained tokens of its sequence x sequences of the step);
    - `constant`: 1 / (constant x sequences of the step).

    Of a policy's own samples, which have a `behaviour`, the metrics say how far the engine and the learner are apart.
    """

    normalise: Literal["token", "sequence", "constant"] = "token"
    constant: float = 1.0
    name: str = "nll"
    needs_entropy: bool = False

    @property
    def scope(self) -> Scope:
        return "sequence" if self.normalise == "sequence" else "token"

    def __call__(self, terms: Terms) -> Loss:
        sums_B = -terms.per_sequence(terms.logprobs_N)
        totals = terms.totals
        if self.normalise == "token":
            value = sums_B.sum() / max(totals.tokens, 1.0)
        elif self.normalise == "sequence":
            value = (sums_B / terms.lengths_B()).sum() / max(totals.sequences, 1.0)
        else:
            value = sums_B.sum() / (self.constant * max(totals.sequences, 1.0))
        count = float(len(terms.logprobs_N))
        metrics: dict[str, Ratio] = {"nll": (sums_B.detach().sum(), count)}
        if "behaviour" not in terms.tokens or not count:
            return Loss(value, metrics)
        gap_N = mismatch(terms, terms.logprobs_N)
        return Loss(value, metrics | {"mismatch/mean": (gap_N.sum(), count)}, {"mismatch/max": gap_N.max()})
