"""What an algorithm of preference optimisation is: options, and an objective made of them. No torch at import."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from lemma.algorithms.algorithm import AlgorithmState
from lemma.algorithms.parts.loss_options import NllWeight
from lemma.config import Options

if TYPE_CHECKING:
    from lemma.objectives import Objective


class NllOptions(Options):
    """An NLL term: imitation of the chosen responses."""

    nll: NllWeight = 0.0

    @property
    def learns_nll(self) -> Literal["none", "response", "all"]:
        return "response" if self.nll else "none"


class PreferenceAlgorithm(Options):
    """What every algorithm of preference optimisation has."""

    name: str = ""
    """Which algorithm."""
    beta: float = Field(0.1, gt=0)
    """Scale of the implicit rewards: beta times log-ratios to the reference, or times log-probabilities without one."""

    paired: ClassVar[bool] = True
    """Whether it learns from pairs; otherwise from single responses, each wanted or unwanted."""

    @property
    def losses(self) -> Mapping[Any, float]:
        """The losses that its options name, with their weights; empty if there is no choice."""
        return {}

    @property
    def needs_reference(self) -> bool:
        """Whether log-probabilities under the reference model are needed."""
        return False

    @property
    def needs_baseline(self) -> bool:
        """Whether responses to other prompts are scored before every step, for KTO's reference point."""
        return False

    @property
    def needs_collisions(self) -> bool:
        """Whether the sum of squared probabilities at every token is computed before every step."""
        return False

    @property
    def learns_nll(self) -> Literal["none", "response", "all"]:
        """Which tokens of the chosen sequence an NLL term imitates."""
        return "none"

    def objective(self, memory: AlgorithmState, baseline: float = 0.0) -> Objective:
        """The loss of one step."""
        raise AssertionError("an algorithm defines its objective")

    def observe(self, metrics: Mapping[str, float], memory: AlgorithmState) -> None:
        """Look at the metrics of a step and update the memory for later steps."""
