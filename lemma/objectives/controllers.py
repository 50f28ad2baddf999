"""Adaptive weights of the KL penalty and the entropy bonus. Their state is a dictionary of numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace


def adapted_coefficient(
    coefficient: float, observed: float, *, target: float, horizon: float, samples: int, largest: float = 0.2
) -> float:
    """The next weight of a KL penalty after a KL of `observed` was measured over `samples` samples (Ziegler et al.,
    2019).

    The weight grows if the KL is above its target and shrinks if it is below, by at most `largest` (relative) per
    `horizon` samples.
    """
    error = min(max(observed / target - 1.0, -largest), largest)
    return coefficient * (1.0 + error * samples / horizon)


@dataclass
class AdaptiveKl:
    """The weight of a KL penalty that keeps the KL near `target` (see `adapted_coefficient`)."""

    coefficient: float
    target: float
    horizon: float

    def update(self, observed: float, samples: int) -> None:
        self.coefficient = adapted_coefficient(
            self.coefficient, observed, target=self.target, horizon=self.horizon, samples=samples
        )

    def state(self) -> dict[str, float]:
        return {"coefficient": self.coefficient}

    def load(self, state: Mapping[str, float]) -> None:
        self.coefficient = float(state["coefficient"])


@dataclass(frozen=True)
class AdamScalar:
    """One step of AdamW on a single number, as in torch."""

    mean: float = 0.0
    square: float = 0.0
    steps: int = 0

    def step(
        self,
        value: float,
        gradient: float,
        *,
        lr: float,
        decay: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> tuple[float, AdamScalar]:
        """The new value and the new state."""
        steps = self.steps + 1
        mean = betas[0] * self.mean + (1 - betas[0]) * gradient
        square = betas[1] * self.square + (1 - betas[1]) * gradient**2
        scale = math.sqrt(square / (1 - betas[1] ** steps)) + eps
        moved = value * (1 - lr * decay) - lr * mean / (1 - betas[0] ** steps) / scale
        return moved, replace(self, mean=mean, square=square, steps=steps)


class LearnedEntropy:
    """The weight alpha of the entropy bonus, trained to keep the entropy near `target`.

    AdamW minimises (mean entropy - target) x alpha over log alpha; `limit` caps alpha, and at the cap there is no
    gradient.
    """

    def __init__(
        self,
        start: float,
        *,
        target: float = 1.0,
        limit: float | None = None,
        lr: float = 1e-2,
        decay: float = 1e-2,
    ):
        self.target, self.limit, self.lr, self.decay = target, limit, lr, decay
        self.log_alpha = math.log(start)
        self._adam = AdamScalar()

    @property
    def coefficient(self) -> float:
        alpha = math.exp(self.log_alpha)
        return alpha if self.limit is None else min(alpha, self.limit)

    def loss(self, mean_entropy: float) -> float:
        return (mean_entropy - self.target) * self.coefficient

    def gradient(self, mean_entropy: float) -> float:
        """Of the loss with respect to log alpha."""
        is_capped = self.limit is not None and math.exp(self.log_alpha) > self.limit
        return 0.0 if is_capped else self.loss(mean_entropy)

    def update(self, mean_entropy: float) -> None:
        self.log_alpha, self._adam = self._adam.step(
            self.log_alpha, self.gradient(mean_entropy), lr=self.lr, decay=self.decay
        )

    def state(self) -> dict[str, float]:
        return {"log_alpha": self.log_alpha, **asdict(self._adam)}

    def load(self, state: Mapping[str, float]) -> None:
        self.log_alpha = float(state["log_alpha"])
        self._adam = AdamScalar(float(state["mean"]), float(state["square"]), int(state["steps"]))
