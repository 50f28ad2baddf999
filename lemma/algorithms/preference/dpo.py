"""DPO (Rafailov et al. 2023) and the losses that grew out of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from lemma.algorithms.algorithm import AlgorithmState
from lemma.algorithms.parts.loss_options import LabelSmoothing
from lemma.algorithms.parts.pair_losses import LossName, check_losses
from lemma.algorithms.preference.preference_algorithm import NllOptions, PreferenceAlgorithm

if TYPE_CHECKING:
    from lemma.objectives.preference import DirectPreference


class Dpo(NllOptions, PreferenceAlgorithm):
    """Direct preference optimisation: raise the chosen response's log-ratio to the reference above the rejected
    one's."""

    name: Literal["dpo"] = "dpo"
    """Direct preference optimisation."""
    loss: LossName | dict[LossName, Annotated[float, Field(gt=0)]] = "sigmoid"
    """The loss of a pair: a name, or several with their weights, such as `{sigmoid: 0.8, bco: 0.2}`."""
    label_smoothing: LabelSmoothing = 0.0
    reference_free: bool = False
    """Use log-probabilities instead of log-ratios; no reference model is needed."""
    divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"] = "reverse_kl"
    """The divergence from the reference that defines the implicit rewards."""
    divergence_alpha: float = 0.5
    """Coefficient of `divergence: alpha`; 1 is the reverse KL, 0 the forward KL."""
    length_alpha: float | None = Field(None, ge=0, le=1)
    """Weight of the tokens beyond the length of the shorter response (LD-DPO). Default: 1."""
    weighting: bool = False
    """Weight pairs by how likely the policy is to generate them (WPO); costs one more forward pass."""
    tau: float = Field(0.05, gt=0)
    """Temperature of the blend in `loss: discopop`."""
    shift: bool = True
    """In `loss: bco`, subtract the running mean of the rewards, this step's batch included."""

    @model_validator(mode="after")
    def _fits(self) -> Dpo:
        check_losses(self)
        return self

    @property
    def losses(self) -> dict[LossName, float]:
        return dict(self.loss) if isinstance(self.loss, dict) else {self.loss: 1.0}

    @property
    def needs_reference(self) -> bool:
        return not self.reference_free

    @property
    def needs_collisions(self) -> bool:
        return self.weighting

    def objective(self, memory: AlgorithmState, baseline: float = 0.0) -> DirectPreference:
        from lemma.objectives.preference import DirectPreference

        seen, mean = memory.numbers.get("steps", 0), memory.numbers.get("mean_reward", 0.0)
        return DirectPreference(
            losses={str(name): weight for name, weight in self.losses.items()},
            beta=self.beta,
            label_smoothing=self.label_smoothing,
            divergence=self.divergence,
            divergence_alpha=self.divergence_alpha,
            tau=self.tau,
            nll=self.nll,
            length_alpha=self.length_alpha,
            weighting=self.weighting,
            running=(int(seen), mean) if "bco" in self.losses and self.shift else None,
        )

    def observe(self, metrics: Mapping[str, float], memory: AlgorithmState) -> None:
        """Update the running mean of the batch means of rewards."""
        seen, mean = memory.numbers.get("steps", 0), memory.numbers.get("mean_reward", 0.0)
        memory.numbers = {"steps": seen + 1, "mean_reward": mean + (metrics["rewards/mean"] - mean) / (seen + 1)}
