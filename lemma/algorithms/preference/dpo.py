"""DPO (Rafailov et al. 2023) and the losses that grew out of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from lemma.algorithms.algorithm import Memory
from lemma.algorithms.preference.preference_algorithm import PreferenceAlgorithm
from lemma.algorithms.unused import refuse_unused

if TYPE_CHECKING:
    from lemma.objectives.preference import DirectPreference

LossName = Literal[
    "sigmoid",
    "sigmoid_norm",
    "hinge",
    "ipo",
    "robust",
    "exo",
    "nca",
    "bco",
    "sppo",
    "aot",
    "aot_unpaired",
    "apo_zero",
    "apo_down",
    "discopop",
]
SMOOTHED = {"sigmoid", "sigmoid_norm", "robust", "exo", "aot", "aot_unpaired"}
# Losses of the difference between the two scores; only these have a meaning under another divergence.
OF_DIFFERENCE = {"sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "exo", "discopop"}
# Losses of ranks: what meets at a rank may come from different pairs.
OF_RANKS = {"aot", "aot_unpaired"}


class Dpo(PreferenceAlgorithm):
    """Direct preference optimisation: raise the log-ratio to the reference of the chosen response above the other's."""

    name: Literal["dpo"] = "dpo"
    """dpo."""
    loss: LossName | dict[LossName, Annotated[float, Field(gt=0)]] = "sigmoid"
    """The loss of a pair: a name, or several with their weights, such as `{sigmoid: 0.8, bco: 0.2}`."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Share of the labels that may be the wrong way round; for sigmoid, robust, exo and aot."""
    nll: float = Field(0.0, ge=0)
    """Weight of the mean NLL of the chosen responses, as in RPO."""
    reference_free: bool = False
    """Take log-probabilities for log-ratios; no reference is held."""
    divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"] = "reverse_kl"
    """Which divergence from the reference the rewards belong to."""
    divergence_alpha: float = 0.5
    """Coefficient of `divergence: alpha`; 1 is the reverse KL, 0 the forward KL."""
    length_alpha: float | None = Field(None, ge=0, le=1)
    """Weight of tokens beyond the length of the shorter response (LD-DPO); not given: 1."""
    weighting: bool = False
    """Weigh pairs by how likely the policy is to say them (WPO); costs a forward pass more."""
    tau: float = Field(0.05, gt=0)
    """Temperature of the blend in `loss: discopop`."""
    shift: bool = True
    """In `loss: bco`, subtract the running mean of rewards, this step's batch included."""

    @model_validator(mode="after")
    def _fits(self) -> Dpo:
        if not self.losses:
            raise ValueError("loss names no loss; write for example `loss: sigmoid`")
        if self.label_smoothing and not SMOOTHED & self.losses.keys():
            raise ValueError(f"label_smoothing has no effect on {self._names}; remove it or write `loss: sigmoid`")
        if self.divergence != "reverse_kl" and self.losses.keys() - OF_DIFFERENCE:
            raise ValueError(f"divergence: {self.divergence} is not defined for {self._names}; write `loss: sigmoid`")
        if self.reference_free and self.divergence != "reverse_kl":
            raise ValueError("without a reference there is no divergence; remove divergence or reference_free")
        if self.weighting and OF_RANKS & self.losses.keys():
            sorts = ", ".join(name for name in self.losses if name in OF_RANKS)
            raise ValueError(
                f"{sorts} sorts the pairs, so a weight has no pair; remove weighting or write another loss"
            )
        if self.divergence != "alpha":
            refuse_unused(self, ("divergence_alpha",), f"on {self.divergence}", "write `divergence: alpha`")
        for option, loss in (("tau", "discopop"), ("shift", "bco")):
            if loss not in self.losses:
                refuse_unused(self, (option,), f"on {self._names}", f"write `loss: {loss}`")
        return self

    @property
    def losses(self) -> dict[LossName, float]:
        return dict(self.loss) if isinstance(self.loss, dict) else {self.loss: 1.0}

    @property
    def _names(self) -> str:
        return ", ".join(self.losses)

    @property
    def needs_reference(self) -> bool:
        return not self.reference_free

    @property
    def needs_collisions(self) -> bool:
        return self.weighting

    @property
    def learns_nll(self) -> Literal["none", "response", "all"]:
        return "response" if self.nll else "none"

    def objective(self, memory: Memory, baseline: float = 0.0) -> DirectPreference:
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

    def observe(self, metrics: Mapping[str, float], memory: Memory) -> None:
        """Go on with the running mean of the batch means of rewards."""
        seen, mean = memory.numbers.get("steps", 0), memory.numbers.get("mean_reward", 0.0)
        memory.numbers = {"steps": seen + 1, "mean_reward": mean + (metrics["rewards/mean"] - mean) / (seen + 1)}
