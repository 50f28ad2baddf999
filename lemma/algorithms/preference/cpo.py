"""CPO (Xu et al. 2024): preference without a reference, with an NLL term in its place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from lemma.algorithms.algorithm import Memory
from lemma.algorithms.preference.preference_algorithm import PreferenceAlgorithm

if TYPE_CHECKING:
    from lemma.objectives.preference import ContrastivePreference


class Cpo(PreferenceAlgorithm):
    """Contrastive preference optimisation: a pair loss on log-probabilities, and imitation of the chosen response."""

    name: Literal["cpo"] = "cpo"
    """cpo."""
    loss: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
    """The loss of a pair; ipo on means over tokens."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Share of the labels that may be the wrong way round; for sigmoid."""
    nll: float = Field(1.0, ge=0)
    """Weight of the mean NLL of the chosen responses."""

    @model_validator(mode="after")
    def _fits(self) -> Cpo:
        if self.label_smoothing and self.loss != "sigmoid":
            raise ValueError(f"label_smoothing has no effect on {self.loss}; remove it or write `loss: sigmoid`")
        return self

    @property
    def learns_nll(self) -> Literal["none", "response", "all"]:
        return "response" if self.nll else "none"

    def objective(self, memory: Memory, baseline: float = 0.0) -> ContrastivePreference:
        from lemma.objectives.preference import ContrastivePreference

        return ContrastivePreference(self.loss, self.beta, label_smoothing=self.label_smoothing, nll=self.nll)
