"""Losses as pure functions on flat tokens. Each is one formula in one place; the learner serves them all alike."""

from lemma.objectives.likelihood import NegativeLogLikelihood
from lemma.objectives.mixed import MixedPolicyLoss
from lemma.objectives.objective import Loss, LossInputs, Objective, Totals
from lemma.objectives.policy_loss import PolicyLoss
from lemma.objectives.value import ClippedValueLoss

__all__ = [
    "ClippedValueLoss",
    "Loss",
    "LossInputs",
    "MixedPolicyLoss",
    "NegativeLogLikelihood",
    "Objective",
    "PolicyLoss",
    "Totals",
]
