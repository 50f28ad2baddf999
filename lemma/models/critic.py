"""The value model of PPO: a backbone of its own under a head with a single output.

It has the surface of a `Policy` that the learner uses; what the learner calls log-probabilities are values here.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import nn

from lemma.core.random import stream
from lemma.models.gathering import GatheredModel
from lemma.models.load_model import build_policy
from lemma.models.model_options import ModelOptions
from lemma.models.packing import TokenBatch

# Spread of the values of a new critic, for hidden states of size 1: small next to a reward of 1, and not 0, so that the
# first step moves the backbone as well.
SPREAD = 0.1


class Critic(GatheredModel):
    """`logprobs` gives the value of the state before each trained token: what the policy saw when it chose it.

    The head is kept in float32 (or better) under a backbone of any precision.
    """

    def __init__(self, backbone: nn.Module, hidden: int, device: torch.device, seed: int):
        self.backbone = backbone
        self.head = nn.Linear(hidden, 1, bias=False, device=device, dtype=torch.float32)
        noise = stream(seed, "critic").normal(size=(1, hidden)) * SPREAD / hidden**0.5
        with torch.no_grad():
            self.head.weight.copy_(torch.from_numpy(noise))
        self.module = nn.ModuleDict({"backbone": backbone, "head": self.head})
        self._no_mask = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device)

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """What hidden states are in."""
        return self._precision or next(self.backbone.parameters()).dtype

    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that are trained, by name, in a fixed order."""
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    def logprobs(
        self, batch: TokenBatch, *, temperature: float = 1.0, entropy: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Values (N,). The temperature plays no part, and there is no entropy."""
        return self._computed(partial(self._values, batch)), None

    def _values(self, batch: TokenBatch) -> torch.Tensor:
        output = self.backbone(
            input_ids=batch.ids_T[None],
            position_ids=batch.positions_T[None],
            attention_mask=self._no_mask,
            use_cache=False,
            segments=batch.segments,
        )
        hidden_NH = output.last_hidden_state.squeeze(0)[batch.sources_N]
        return self.head(hidden_NH.to(self.head.weight.dtype))[:, 0]


def build_critic(
    options: ModelOptions, device: torch.device, seed: int, start_from: Path | None = None, recomputed: int = 0
) -> Critic:
    """A critic on the backbone of a model: the policy's own at its start, or another. With LoRA only adapters and head
    are trained. Activations of so many blocks are `recomputed`."""
    policy = build_policy(options, device, seed, start_from)
    policy.recompute(recomputed)
    return Critic(policy.backbone, policy.head.weight.shape[1], device, seed)
