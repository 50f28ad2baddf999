"""SimPO (Meng et al. 2024) and AlphaPO (Gupta et al. 2025): mean log-probabilities and a target margin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from lemma.algorithms.algorithm import Memory
from lemma.algorithms.preference.preference_algorithm import PreferenceAlgorithm

if TYPE_CHECKING:
    from lemma.objectives.preference import ContrastivePreference


class Simpo(PreferenceAlgorithm):
    """Simple preference optimisation: beta times the difference of mean log-probabilities shall exceed gamma."""

    name: Literal["simpo"] = "simpo"
    """simpo."""
    beta: float = Field(2.0, gt=0)
    """Scale of the mean log-probabilities; larger than elsewhere, because they are means."""
    gamma: float = Field(1.0, ge=0)
    """The margin that a pair shall have, in units of reward."""
    alpha: float = 0.0
    """AlphaPO: the reward is (1 - p^-alpha) / alpha in place of log p; 0 is SimPO."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Share of the labels that may be the wrong way round."""
    nll: float = Field(0.0, ge=0)
    """Weight of the mean NLL of the chosen responses; above 0 it is CPO-SimPO."""

    @property
    def learns_nll(self) -> Literal["none", "response", "all"]:
        return "response" if self.nll else "none"

    def objective(self, memory: Memory, baseline: float = 0.0) -> ContrastivePreference:
        from lemma.objectives.preference import ContrastivePreference

        return ContrastivePreference(
            loss="simpo",
            beta=self.beta,
            gamma=self.gamma,
            label_smoothing=self.label_smoothing,
            alpha=self.alpha,
            nll=self.nll,
        )
