"""How far an engine's and the learner's log-probabilities of the same tokens may differ."""

from __future__ import annotations

from typing import Literal, NamedTuple, NoReturn

from lemma.core.errors import UserError
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
