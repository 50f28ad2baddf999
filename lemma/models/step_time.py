"""The time of a step as arithmetic: operations over a matrix rate, bytes over a bandwidth. Computed, never measured.

P parameters, N ranks, T tokens of a step. Numbers only, no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lemma.models.gpus import GPUS_A_MACHINE, NETWORK_RATE, Gpu

# Shares of the data sheet's rates that well-kept programs reach.
MATRIX_SHARE = 0.4
MEMORY_SHARE = 0.6
LINK_SHARE = 0.7


@dataclass(frozen=True)
class StepWork:
    """What one step asks for, over all ranks. `trainable` parameters get gradients; `updates` are optimiser steps."""

    parameters: float
    trainable: float
    tokens: float
    pack: int
    updates: int = 1
    passes: int = 1
    checkpointing: bool = False
    samples: int = 0
    prompt: float = 0.0
    response: float = 0.0

    def update_seconds(self, gpu: Gpu, ranks: int) -> float:
        """6PT FLOP, 2PT for each product; frozen weights need no gradient of their own, recomputing needs a forward."""
        products = 2 + (self.trainable > 0.5 * self.parameters) + self.checkpointing
        work = 2 * products * self.parameters * self.tokens * self.passes
        return work / ranks / (gpu.matrix_rate * MATRIX_SHARE)

    def communication_bytes(self, shard: str, ranks: int) -> float:
        """Bytes that a rank sends: fp32 gradients once for each update, or for each pack where a rank keeps its part
        only; bf16 weights afterwards, or twice for each pack where they are split."""
        packs = math.ceil(self.tokens * self.passes / self.updates / ranks / self.pack)
        gradient, weight = 4 * self.trainable, 2 * self.trainable
        each_update = {
            "none": 2 * gradient,
            "optimiser": gradient + weight,
            "gradients": packs * gradient + weight,
            "weights": packs * (gradient + 2 * 2 * self.parameters),
        }[shard]
        return self.updates * each_update * (ranks - 1) / ranks

    def communication_seconds(self, gpu: Gpu, ranks: int, shard: str) -> float:
        rate = gpu.link_rate if ranks <= GPUS_A_MACHINE else min(gpu.link_rate, NETWORK_RATE)
        return self.communication_bytes(shard, ranks) / (rate * LINK_SHARE)

    def generation_seconds(self, gpu: Gpu, ranks: int, room: float, token_bytes: float) -> float | None:
        """Decoding in rounds of as many samples as the cache has room for (`room` tokens of `token_bytes`): for each
        token the weights and the cache are read once, or its products take longer. None where nothing fits."""
        mine = math.ceil(self.samples / ranks)
        at_once = min(mine, int(room // (self.prompt + self.response)))
        if at_once < 1:
            return None
        rounds = math.ceil(mine / at_once)
        read = 2 * self.parameters + at_once * (self.prompt + self.response / 2) * token_bytes
        memory = read / (gpu.memory_rate * MEMORY_SHARE)
        products = 2 * self.parameters * at_once / (gpu.matrix_rate * MATRIX_SHARE)
        prefill = 2 * self.parameters * mine * self.prompt / (gpu.matrix_rate * MATRIX_SHARE)
        return prefill + rounds * self.response * max(memory, products)
