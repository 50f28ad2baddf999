"""Negative log-likelihood of demonstrations."""

from __future__ import annotations

from dataclasses import dataclass

from lemma.core.types import Output, Scope
from lemma.objectives.objective import Loss, LossInputs, Normalise, Ratio, divisors
from lemma.objectives.policy_loss import mismatch


@dataclass(frozen=True)
class NegativeLogLikelihood:
    """-sum log p, divided as `normalise` says (normalise.py).

    For a policy's own samples, which have `sampler_logprobs`, the metrics measure how far engine and learner are apart.
    """

    normalise: Normalise = "token"
    constant: float = 1.0
    name: str = "nll"
    outputs: tuple[Output, ...] = ("logprobs",)

    @property
    def scope(self) -> Scope:
        return "sequence" if self.normalise == "sequence" else "token"

    def __call__(self, terms: LossInputs) -> Loss:
        sums_B = -terms.per_sequence(terms.logprobs_N)
        of_sequence_B, of_all = divisors(terms, self.normalise, self.constant)
        value = (sums_B if of_sequence_B is None else sums_B / of_sequence_B).sum() / of_all
        count = float(len(terms.logprobs_N))
        metrics: dict[str, Ratio] = {"nll": (sums_B.detach().sum(), count)}
        if "sampler_logprobs" not in terms.tokens or not count:
            return Loss(value, metrics)
        gap_N = mismatch(terms, terms.logprobs_N)
        return Loss(value, metrics | {"mismatch/mean": (gap_N.sum(), count)}, {"mismatch/max": gap_N.max()})
