"""Differences between an engine's and the learner's log-probabilities, held to what a run allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lemma.engines.mismatch import MismatchLimit
from lemma.engines.protocol import Completion
from lemma.models.model_options import Precision


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Absolute differences of log-probabilities over all tokens; 0 without tokens."""

    mean: float
    largest: float
    tokens: int

    def as_metrics(self) -> dict[str, float]:
        return {"mismatch/mean": self.mean, "mismatch/max": self.largest}


def mismatch(completions: Sequence[Completion], learner: Sequence[np.ndarray]) -> Mismatch:
    """`learner` holds, for each completion, the learner's log-probability of each of its ids at the sampling
    temperature, computed with the weights that generated it."""
    gaps = [np.zeros(0)]
    for completion, theirs in zip(completions, learner, strict=True):
        assert len(theirs) == len(completion.ids), "one log-probability per id"
        gaps.append(np.abs(np.asarray(theirs, dtype=np.float64) - completion.logprobs))
    together = np.concatenate(gaps)
    if not len(together):
        return Mismatch(0.0, 0.0, 0)
    return Mismatch(float(together.mean()), float(together.max()), len(together))


def check_mismatch(
    measured: Mismatch, precision: Precision, engine: str = "native", rounding: float = 0.0, temperature: float = 1.0
) -> None:
    """Stop if engine and learner disagree too much. Warnings from `warning_mean` on are left to the caller."""
    limit = MismatchLimit.of(precision, rounding, temperature)
    value = measured.as_metrics()[limit.metric]
    if not value <= limit.most:
        limit.refuse(value, engine)
