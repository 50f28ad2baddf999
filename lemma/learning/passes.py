"""The passes of a step: which rank computes which pack, and what is found of the packs of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch

from lemma.core.ranks import gather_over_ranks, slots, together
from lemma.core.types import Scope, Trajectory
from lemma.learning.parameter_pieces import deal
from lemma.models.packing import TokenBatch
from lemma.models.policy import PackModel
from lemma.objectives.objective import Loss

T = TypeVar("T")


def deal_packs(packs: Sequence[Sequence[int]], trajectories: Sequence[Trajectory]) -> list[list[int]]:
    """The numbers of the packs of each slot, in order. A single slot has all of them."""
    if slots() == 1:
        return [list(range(len(packs)))]
    hands = deal([sum(len(trajectories[i]) for i in pack) for pack in packs], slots())
    return [[number for number, hand in enumerate(hands) if hand == slot] for slot in range(slots())]


def by_all_ranks(
    work: Callable[[], T],
    place: str,
    policy: PackModel,
    packs: Sequence[Sequence[int]],
    trajectories: Sequence[Trajectory],
    *,
    learns: bool = False,
) -> list[T]:
    """Have each rank compute its own packs; what all of them found. With `learns`, passes go backward too."""
    if not policy.is_split:
        return together(work, place)
    from lemma.learning.split_passes import pass_together

    return pass_together(work, place, policy, packs, trajectories, learns)


def is_one_group(trajectories: Sequence[Trajectory], scope: Scope) -> bool:
    """Whether the packer cannot take these apart."""
    return len({t.group_id for t in trajectories}) == 1 if scope == "pair" else len(trajectories) == 1


@dataclass
class Sums:
    """Losses and metrics of packs, kept on the device until they are read back, once, and added in the order of packs.

    A pack that several ranks add is the same on all of them and counts once.
    """

    _device: torch.device
    _sums: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    _maxima: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)

    def add(self, number: int, loss: Loss) -> None:
        pairs = {"loss": (loss.value.detach(), 0.0), **loss.metrics}
        kind = {"dtype": torch.float64, "device": self._device}
        # A number is made on the device: a copy from the host would wait for all that the device has to do.
        self._sums[number] = {
            name: torch.stack(
                [x.detach().to(**kind) if isinstance(x, torch.Tensor) else torch.full((), x, **kind) for x in pair]
            )
            for name, pair in pairs.items()
        }
        self._maxima[number] = {name: value.detach().to(torch.float64) for name, value in loss.maxima.items()}

    def result(self) -> dict[str, float]:
        """Sums over the packs of all ranks, each divided by its count, and maxima; the loss is a sum already."""
        sums: dict[str, tuple[float, float]] = {}
        for pack in _of_all_packs(self._sums):
            for name, (value, count) in pack.items():
                before = sums.get(name)
                sums[name] = (value, count) if before is None else (before[0] + value, before[1] + count)
        result = {"loss": 0.0}
        for name in sorted(sums):
            value, count = sums[name]
            result[name] = value if name == "loss" else value / count if count else 0.0
        for pack in _of_all_packs(self._maxima):
            for name, value in pack.items():
                result[name] = float(np.maximum(result.get(name, value), value))
        return result


def _of_all_packs(by_pack: Mapping[int, Mapping[str, torch.Tensor]]) -> list[dict[str, Any]]:
    """The numbers of the packs of all ranks, in their order."""
    flat = [tensor for pack in by_pack.values() for tensor in pack.values()]
    numbers = iter(torch.stack(flat).tolist() if flat else [])
    own = {number: {name: next(numbers) for name in pack} for number, pack in by_pack.items()}
    everything = {
        number: pack for part in gather_over_ranks(own, "the numbers of a step") for number, pack in part.items()
    }
    return [everything[number] for number in sorted(everything)]


@dataclass
class TokenScores:
    """Numbers of trained tokens, collected pack by pack and given back by trajectory.

    Kept on the device until they are read: a copy from there waits for all that the device has to do."""

    _packs: list[tuple[tuple[int, ...], torch.Tensor, torch.Tensor]] = field(default_factory=list)

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
