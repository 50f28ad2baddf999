"""The difference between an engine's and the learner's log-probabilities of the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, NoReturn

import numpy as np

from lemma.core.errors import UserError
from lemma.engines.protocol import Completion
from lemma.models.model_options import Precision

# In float32, at temperature 1, no token may differ by more; with real weights the maximum over 20,000 tokens was 4e-5.
# A lower temperature scales logits up, and with them their rounding errors.
EXACT_LIMIT = 1e-4
# In half precision the mean counts. Trained models have larger rounding errors than random ones, so the limits are also
# multiples of the rounding error of the model's own log-probabilities (`Policy.findings`).
WARNING_MEAN, WARNING_ROUNDINGS = 0.03, 2.0
STOPPING_MEAN, STOPPING_ROUNDINGS = 0.1, 5.0


def warning_mean(rounding: float) -> float:
    """The mean difference in half precision above which a step warns."""
    return max(WARNING_MEAN, WARNING_ROUNDINGS * rounding)


def stopping_mean(rounding: float) -> float:
    """The mean difference in half precision above which a run stops."""
    return max(STOPPING_MEAN, STOPPING_ROUNDINGS * rounding)


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


class MismatchLimit(NamedTuple):
    """What engine and learner may differ by under settings that do not change, and in which metric."""

    metric: Literal["mismatch/max", "mismatch/mean"]
    most: float
    precision: Precision

    @classmethod
    def of(cls, precision: Precision, rounding: float = 0.0, temperature: float = 1.0) -> MismatchLimit:
        if precision == "fp32":
            return cls("mismatch/max", EXACT_LIMIT / min(1.0, temperature), precision)
        return cls("mismatch/mean", stopping_mean(rounding), precision)

    def refuse(self, value: float, engine: str) -> NoReturn:
        """Stop: training on such tokens would be wrong."""
        what = "at most" if self.metric == "mismatch/max" else "on average"
        raise UserError(
            f"the {engine} engine and the learner disagree about the tokens that were sampled: their log-probabilities "
            f"differ by {value:.2g} {what}, and rounding in {self.precision} explains {self.most:.2g}",
            fix="write `engine: transformers` under rollout to see whether the engine is at fault, and check the "
            "learning rate",
        )


def check_mismatch(
    measured: Mismatch, precision: Precision, engine: str = "native", rounding: float = 0.0, temperature: float = 1.0
) -> None:
    """Stop if engine and learner disagree too much. Warnings from `warning_mean` on are left to the caller."""
    limit = MismatchLimit.of(precision, rounding, temperature)
    value = measured.as_metrics()[limit.metric]
    if not value <= limit.most:
        limit.refuse(value, engine)
