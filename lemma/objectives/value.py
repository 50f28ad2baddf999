"""PPO's value loss: squared error to the returns, with steps away from the old value clipped."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lemma.core.types import Output, Scope
from lemma.objectives.objective import Loss, LossInputs


def value_errors(
    values: torch.Tensor, old: torch.Tensor, returns: torch.Tensor, clip: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Half the squared error of each value, the larger of unclipped and clipped, and where the clipped one is
    larger."""
    plain = (values - returns).square()
    if clip is None:
        return 0.5 * plain, torch.zeros_like(plain)
    clipped = (values.clamp(old - clip, old + clip) - returns).square()
    return 0.5 * torch.maximum(plain, clipped), (clipped > plain).to(plain.dtype)


@dataclass(frozen=True)
class ClippedValueLoss:
    """weight x sum of `value_errors` / all trained tokens of the step.

    Reads the values of a `Critic` and the token fields `value` (before the first update on this batch) and `return`.
    """

    clip: float | None = 0.2
    weight: float = 1.0
    name: str = "value"
    scope: Scope = "token"
    outputs: tuple[Output, ...] = ("values",)

    def __call__(self, terms: LossInputs) -> Loss:
        values_N, old_N, returns_N = terms.values_N, terms.tokens["value"], terms.tokens["return"]
        errors_N, clipped_N = value_errors(values_N, old_N, returns_N, self.clip)
        count = float(len(values_N))
        still_N = values_N.detach()
        metrics = {
            "value_loss": (errors_N.detach().sum(), count),
            "value_clipped": (clipped_N.sum(), count),
            "value": (still_N.sum(), count),
            "return": (returns_N.sum(), count),
            "value_error": ((still_N - returns_N).abs().sum(), count),
        }
        return Loss(self.weight * errors_N.sum() / max(terms.totals.tokens, 1.0), metrics)
