"""Surrogate objectives of a token: functions of the advantage and of the ratio of the policy to the one that sampled.

Each is elementwise on tensors of any shape. `gain` is maximised. `clipped` marks what the surrogate clips, for the
metrics: `low` (negative advantage, already less likely than before), `high` (positive advantage, already more likely)
and `region` (either, or a weight that was capped whatever the advantage).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch


class Surrogate(Protocol):
    def gain(self, ratio: torch.Tensor, logprobs: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor: ...
    def clipped(self, ratio: torch.Tensor, advantage: torch.Tensor) -> Mapping[str, torch.Tensor]: ...


@dataclass(frozen=True)
class LogprobGain:
    """A log p: no ratio, so correct only for tokens that the current policy sampled."""

    def gain(self, ratio: torch.Tensor, logprobs: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
        return advantage * logprobs

    def clipped(self, ratio: torch.Tensor, advantage: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {}


@dataclass(frozen=True)
class Unclipped:
    """r A."""

    def gain(self, ratio: torch.Tensor, logprobs: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
        return ratio * advantage

    def clipped(self, ratio: torch.Tensor, advantage: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {}


@dataclass(frozen=True)
class Clip:
    """min(r A, clip(r, low, high) A); with `cap`, r itself is capped (two-sided clipping, for A < 0 too)."""

    low: float
    high: float
    cap: float | None = None

    @classmethod
    def around(cls, epsilon: float, epsilon_high: float | None = None, cap: float | None = None) -> Clip:
        """[1 - epsilon, 1 + epsilon_high], as in PPO; a larger `epsilon_high` is DAPO's clip-higher."""
        return cls(1.0 - epsilon, 1.0 + (epsilon if epsilon_high is None else epsilon_high), cap)

    @classmethod
    def symmetric_in_log(cls, epsilon: float) -> Clip:
        """[1 / (1 + epsilon), 1 + epsilon], as in LOOP."""
        return cls(1.0 / (1.0 + epsilon), 1.0 + epsilon)

    def gain(self, ratio: torch.Tensor, logprobs: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
        return torch.minimum(self._capped(ratio) * advantage, ratio.clamp(self.low, self.high) * advantage)

    def clipped(self, ratio: torch.Tensor, advantage: torch.Tensor) -> Mapping[str, torch.Tensor]:
        ratio = self._capped(ratio)
        return {"low": (ratio < self.low) & (advantage < 0), "high": (ratio > self.high) & (advantage > 0)}

    def _capped(self, ratio: torch.Tensor) -> torch.Tensor:
        return ratio if self.cap is None else ratio.clamp(max=self.cap)


@dataclass(frozen=True)
class CappedWeight:
    """min(r, cap) A log p, with no gradient through the weight (CISPO): no token loses its gradient entirely."""

    cap: float

    def gain(self, ratio: torch.Tensor, logprobs: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
        return ratio.detach().clamp(max=self.cap) * advantage * logprobs

    def clipped(self, ratio: torch.Tensor, advantage: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {"high": (ratio > self.cap) & (advantage > 0), "region": ratio > self.cap}


@dataclass(frozen=True)
class SoftGate:
    """4 / t sigmoid(t (r - 1)) A, with a temperature t for each sign of A (SAPO): a smooth version of clipping."""

    positive: float = 1.0
    negative: float = 1.05

    def gain(self, ratio: torch.Tensor, logprobs: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
        temperature = torch.where(advantage > 0, self.positive, self.negative)
        return 4.0 / temperature * torch.sigmoid(temperature * (ratio - 1.0)) * advantage

    def clipped(self, ratio: torch.Tensor, advantage: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {}


@dataclass(frozen=True)
class GammaWeight:
    """w^k exp(l (1 - w)) A log p, with no gradient through the weight (VESPO). w is the ratio of a whole sequence.

    The weight is 1 at w = 1 and falls on both sides; k and l depend on the sign of A.
    """

    power_positive: float = 2.0
    decay_positive: float = 3.0
    power_negative: float = 3.0
    decay_negative: float = 2.0

    def weight(self, ratio: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
        log_w = ratio.detach().log().clamp(math.log(1e-8), 20.0)
        wanted = advantage >= 0
        power = torch.where(wanted, self.power_positive, self.power_negative)
        decay = torch.where(wanted, self.decay_positive, self.decay_negative)
        return (decay + power * log_w - decay * log_w.exp()).exp()

    def gain(self, ratio: torch.Tensor, logprobs: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
        return self.weight(ratio, advantage) * advantage * logprobs

    def clipped(self, ratio: torch.Tensor, advantage: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {}
