"""Losses as pure functions on flat tokens. Each is one formula in one place; the learner serves them all alike."""

from collections.abc import Callable

from lemma.objectives.base import Loss, Objective, Terms, Totals
from lemma.objectives.reductions import (
    entropy,
    masked_mean,
    masked_mean_or_zero,
    masked_normalize,
    sft_microbatch_loss,
    sft_microbatch_train_step,
)
from lemma.objectives.supervised import NegativeLogLikelihood

# Every objective, in each form that changes what must stay together; the invariance tests run over this table.
OBJECTIVES: dict[str, Callable[[], Objective]] = {
    "nll_token": lambda: NegativeLogLikelihood("token"),
    "nll_sequence": lambda: NegativeLogLikelihood("sequence"),
    "nll_constant": lambda: NegativeLogLikelihood("constant", constant=42.0),
}

__all__ = [
    "OBJECTIVES",
    "Loss",
    "NegativeLogLikelihood",
    "Objective",
    "Terms",
    "Totals",
    "entropy",
    "masked_mean",
    "masked_mean_or_zero",
    "masked_normalize",
    "sft_microbatch_loss",
    "sft_microbatch_train_step",
]
