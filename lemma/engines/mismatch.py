"""The difference between what an engine said about its tokens and what the learner says about the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lemma.core.errors import UserError
from lemma.engines.base import Completion
from lemma.models.options import Precision

# In float32 no token may differ by more; in half precision the mean counts.
EXACT_LIMIT = 1e-4
WARNING_MEAN = 0.03
STOPPING_MEAN = 0.1


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


def check_mismatch(found: Mismatch, precision: Precision, engine: str = "native") -> None:
    """Stop: tokens that the learner sees quite otherwise than the engine teach the wrong thing. Whoever looks at each
    step warns from `WARNING_MEAN` on."""
    exact = precision == "fp32"
    value, limit = (found.largest, EXACT_LIMIT) if exact else (found.mean, STOPPING_MEAN)
    what = "at most" if exact else "on average"
    if not value <= limit:
        raise UserError(
            f"the log-probabilities of the {engine} engine and of the learner differ by {value:.2g} {what}, more than "
            f"the {limit:g} that {precision} allows",
            fix="write `engine: transformers` under rollout to see whether the engine is at fault, and check the "
            "learning rate",
        )
