"""CPO (Xu et al. 2024): preference without a reference, with an NLL term instead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import model_validator

from lemma.algorithms.algorithm import AlgorithmState
from lemma.algorithms.parts.loss_options import LabelSmoothing, NllWeight
from lemma.algorithms.preference.preference_algorithm import NllOptions, PreferenceAlgorithm

if TYPE_CHECKING:
    from lemma.objectives.preference import ContrastivePreference


class Cpo(NllOptions, PreferenceAlgorithm):
    """Contrastive preference optimisation: a pair loss on log-probabilities, and imitation of the chosen response."""

    name: Literal["cpo"] = "cpo"
    """Contrastive preference optimisation."""
    loss: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
    """The loss of a pair; ipo uses means over tokens."""
    label_smoothing: LabelSmoothing = 0.0
    nll: NllWeight = 1.0

    @model_validator(mode="after")
    def _fits(self) -> Cpo:
        if self.label_smoothing and self.loss != "sigmoid":
            raise ValueError(f"label_smoothing has no effect on {self.loss}; remove it or write `loss: sigmoid`")
        return self

    @property
    def losses(self) -> dict[str, float]:
        return {self.loss: 1.0}

    def objective(self, memory: AlgorithmState, baseline: float = 0.0) -> ContrastivePreference:
        from lemma.objectives.preference import ContrastivePreference

        return ContrastivePreference(self.loss, self.beta, label_smoothing=self.label_smoothing, nll=self.nll)
