"""Numbers of trained tokens, collected pack by pack and given back by trajectory."""

from __future__ import annotations

import numpy as np
import torch

from lemma.core.ranks import gather_over_ranks
from lemma.models.packing import TokenBatch


class TokenScores:
    """Kept on the device until they are read: a copy from there waits for all that the device has to do."""

    def __init__(self) -> None:
        self._packs: list[tuple[tuple[int, ...], torch.Tensor, torch.Tensor]] = []

    def add(self, batch: TokenBatch, values_N: torch.Tensor) -> None:
        self._packs.append((batch.index_B, batch.sequence_N, values_N.detach()))

    def by_trajectory(self, count: int) -> list[np.ndarray]:
        """One array for each of so many trajectories, from the packs of all ranks."""
        own: dict[int, np.ndarray] = {}
        for index_B, sequence_N, values_N in self._packs:
            sizes = torch.bincount(sequence_N, minlength=len(index_B)).tolist()
            own |= {i: part.numpy() for i, part in zip(index_B, values_N.cpu().split(sizes), strict=True)}
        everything = [np.empty(0, dtype=np.float32)] * count
        for of_rank in gather_over_ranks(own, "the scores of all sequences"):
            for i, part in of_rank.items():
                everything[i] = part
        return everything
