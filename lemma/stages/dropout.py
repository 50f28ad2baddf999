"""Dropout is for imitation: where log-probabilities are compared, chance in the network would only blur them."""

from __future__ import annotations

from torch import nn

from lemma.runs.stage import Stage


def switch_dropout_off(module: nn.Module, stage: Stage) -> None:
    """Set every dropout of the model to 0, and say so where there was any."""
    dropouts = [part for part in module.modules() if isinstance(part, nn.Dropout) and part.p > 0]
    for part in dropouts:
        part.p = 0.0
    if dropouts:
        stage.say(f"{stage.name}: the model's dropout is off in stages of kind {stage.options.kind}")
