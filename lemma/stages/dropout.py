"""Dropout is for supervised training only: comparisons of log-probabilities must not be noisy."""

from __future__ import annotations

from torch import nn

from lemma.models.dropouts import switch_off
from lemma.runs.stage import Stage


def switch_dropout_off(module: nn.Module, stage: Stage) -> None:
    """Set every dropout of the model to 0, and say so if there was any."""
    if switch_off(module):
        stage.say(f"{stage.name}: the model's dropout is off in stages of kind {stage.options.kind}")
