"""ORPO (Hong et al. 2024): supervised learning and preference in one step, without a reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from lemma.algorithms.algorithm import AlgorithmState
from lemma.algorithms.preference.preference_algorithm import PreferenceAlgorithm

if TYPE_CHECKING:
    from lemma.objectives.preference import OddsRatio


class Orpo(PreferenceAlgorithm):
    """Odds-ratio preference optimisation: imitate the chosen response and raise its odds above the rejected one's."""

    name: Literal["orpo"] = "orpo"
    """Odds-ratio preference optimisation."""
    beta: float = Field(0.1, gt=0)
    """Weight of the odds-ratio term in the loss."""
    imitate: Literal["all", "response"] = "all"
    """What the NLL term is computed on: prompt and chosen response, as in the original, or the response alone."""

    @property
    def learns_nll(self) -> Literal["none", "response", "all"]:
        return self.imitate

    def objective(self, memory: AlgorithmState, baseline: float = 0.0) -> OddsRatio:
        from lemma.objectives.preference import OddsRatio

        return OddsRatio(self.beta)
