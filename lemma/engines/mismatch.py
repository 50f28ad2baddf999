"""The difference between what an engine said about its tokens and what the learner says about the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lemma.core.errors import UserError
from lemma.engines.protocol import Completion
from lemma.models.model_options import Precision

# In float32 no token may differ by more at temperature 1, where real weights came to 4e-5 over 20,000 tokens. A lower
# temperature divides logits, and with them their rounding.
EXACT_LIMIT = 1e-4
# In half precision the mean counts. Trained models round more than random ones, so the limits are also multiples of how
# far a model's own log-probabilities are off by rounding (`Policy.findings`).
WARNING_MEAN, WARNING_ROUNDINGS = 0.03, 2.0
STOPPING_MEAN, STOPPING_ROUNDINGS = 0.1, 5.0


def warning_mean(rounding: float) -> float:
    """The mean difference in half precision from which on a step warns."""
    return max(WARNING_MEAN, WARNING_ROUNDINGS * rounding)


def stopping_mean(rounding: float) -> float:
    """The mean difference in half precision from which on a run stops."""
    return max(STOPPING_MEAN, STOPPING_ROUNDINGS * rounding)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Absolute differences of log-probabilities over all tokens. Without tokens there is none."""

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


def exact_limit(temperature: float) -> float:
    """How far a token's log-probabilities may differ in float32."""
    return EXACT_LIMIT / min(1.0, temperature)


def check_mismatch(
    measured: Mismatch, precision: Precision, engine: str = "native", rounding: float = 0.0, temperature: float = 1.0
) -> None:
    """Stop: tokens that the learner sees quite otherwise than the engine teach the wrong thing. Whoever looks at each
    step warns from `warning_mean` on."""
    exact = precision == "fp32"
    value, limit = (measured.largest, exact_limit(temperature)) if exact else (measured.mean, stopping_mean(rounding))
    what = "at most" if exact else "on average"
    if not value <= limit:
        raise UserError(
            f"the {engine} engine and the learner disagree about the tokens that were sampled: their log-probabilities "
            f"differ by {value:.2g} {what}, and rounding in {precision} explains {limit:.2g}",
            fix="write `engine: transformers` under rollout to see whether the engine is at fault, and check the "
            "learning rate",
        )
