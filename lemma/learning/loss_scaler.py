"""The loss scale of fp16."""

from __future__ import annotations

from collections.abc import Mapping

SCALE_START, SCALE_GROWTH, SCALE_PATIENCE = 2.0**16, 2.0, 2000


class LossScaler:
    """Keeps fp16 gradients in range: halves the scale when one overflows, doubles it after many that did not."""

    def __init__(self, enabled: bool):
        self.enabled = enabled
        self.scale = SCALE_START if enabled else 1.0
        self.good_steps = 0

    def update(self, finite: bool) -> None:
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.scale = max(1.0, self.scale / SCALE_GROWTH)
        elif self.good_steps % SCALE_PATIENCE == 0:
            self.scale *= SCALE_GROWTH

    def state(self) -> dict[str, float]:
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load(self, state: Mapping[str, float]) -> None:
        self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])
