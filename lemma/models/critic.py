"""The value model of PPO: a backbone of its own under a head with a single output."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch
from torch import nn

from lemma.core.random import stream
from lemma.core.types import Output
from lemma.models.load_model import build_policy
from lemma.models.model_options import ModelOptions
from lemma.models.packing import TokenBatch
from lemma.models.policy import PackModel

# Spread of the values of a new critic, for hidden states of size 1: small next to a reward of 1, and not 0, so that the
# first step moves the backbone as well.
SPREAD = 0.1


class Critic(PackModel):
    """Its `values` are those of the state before each trained token: what the policy saw when it chose it.

    The head is kept in float32 (or better) under a backbone of any precision.
    """

    gives = ("values",)

    def __init__(self, backbone: nn.Module, hidden: int, device: torch.device, seed: int):
        self.backbone = backbone
        self.head = nn.Linear(hidden, 1, bias=False, device=device, dtype=torch.float32)
        noise = stream(seed, "critic").normal(size=(1, hidden)) * SPREAD / hidden**0.5
        with torch.no_grad():
            self.head.weight.copy_(torch.from_numpy(noise))
        self.module = nn.ModuleDict({"backbone": backbone, "head": self.head})
        self._no_mask = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device)

    @property
    def dtype(self) -> torch.dtype:
        """What hidden states are in."""
        return self._precision or next(self.backbone.parameters()).dtype

    def _outputs(self, batch: TokenBatch, names: Collection[Output], temperature: float) -> dict[Output, torch.Tensor]:
        return {"values": self.head(self._of_targets(batch).to(self.head.weight.dtype))[:, 0]}


def build_critic(
    options: ModelOptions, device: torch.device, seed: int, start_from: Path | None = None, recomputed: int = 0
) -> Critic:
    """A critic on the backbone of a model: the policy's own at its start, or another. With LoRA only adapters and head
    are trained. Activations of so many blocks are `recomputed`."""
    policy = build_policy(options, device, seed, start_from)
    policy.recompute(recomputed)
    return Critic(policy.backbone, policy.head.weight.shape[1], device, seed)
