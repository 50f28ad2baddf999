"""KTO (Ethayarajh et al. 2024): single responses, each wanted or unwanted."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from lemma.algorithms.algorithm import AlgorithmState
from lemma.algorithms.preference.preference_algorithm import PreferenceAlgorithm

if TYPE_CHECKING:
    from lemma.objectives.preference import KahnemanTversky


class Kto(PreferenceAlgorithm):
    """Kahneman-Tversky optimisation: gains and losses of single responses relative to a reference point."""

    name: Literal["kto"] = "kto"
    """Kahneman-Tversky optimisation."""
    loss: Literal["kto", "apo_zero_unpaired"] = "kto"
    """kto estimates its reference point from responses to other prompts; apo_zero_unpaired uses 0."""
    wanted_weight: float = Field(1.0, gt=0)
    """Weight of wanted responses. With n wanted and m unwanted ones, wanted_weight x n : unwanted_weight x m should lie
    between 1:1 and 4:3."""
    unwanted_weight: float = Field(1.0, gt=0)
    """Weight of unwanted responses."""

    paired: ClassVar[bool] = False

    @property
    def losses(self) -> dict[str, float]:
        return {self.loss: 1.0}

    @property
    def needs_reference(self) -> bool:
        return True

    @property
    def needs_baseline(self) -> bool:
        return self.loss == "kto"

    def objective(self, memory: AlgorithmState, baseline: float = 0.0) -> KahnemanTversky:
        from lemma.objectives.preference import KahnemanTversky

        return KahnemanTversky(
            loss=self.loss,
            beta=self.beta,
            wanted_weight=self.wanted_weight,
            unwanted_weight=self.unwanted_weight,
            baseline=baseline,
        )
