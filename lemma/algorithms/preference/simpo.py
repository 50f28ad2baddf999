"""SimPO (Meng et al. 2024) and AlphaPO (Gupta et al. 2025): mean log-probabilities and a target margin.

With `nll` it is CPO-SimPO.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from lemma.algorithms.algorithm import AlgorithmState
from lemma.algorithms.parts.loss_options import LabelSmoothing
from lemma.algorithms.preference.preference_algorithm import NllOptions, PreferenceAlgorithm

if TYPE_CHECKING:
    from lemma.objectives.preference import ContrastivePreference


class Simpo(NllOptions, PreferenceAlgorithm):
    """Simple preference optimisation: beta times the difference of mean log-probabilities should exceed gamma."""

    name: Literal["simpo"] = "simpo"
    """Simple preference optimisation."""
    beta: float = Field(2.0, gt=0)
    """Scale of the mean log-probabilities; larger than elsewhere, because they are means."""
    gamma: float = Field(1.0, ge=0)
    """Target margin of a pair, in units of reward."""
    alpha: float = 0.0
    """AlphaPO: the reward is (1 - p^-alpha) / alpha instead of log p; 0 is SimPO."""
    label_smoothing: LabelSmoothing = 0.0

    def objective(self, memory: AlgorithmState, baseline: float = 0.0) -> ContrastivePreference:
        from lemma.objectives.preference import ContrastivePreference

        return ContrastivePreference(
            loss="simpo",
            beta=self.beta,
            gamma=self.gamma,
            label_smoothing=self.label_smoothing,
            alpha=self.alpha,
            nll=self.nll,
        )
