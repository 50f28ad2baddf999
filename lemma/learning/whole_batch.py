"""Adding up what an objective finds: over packs, and for an objective that needs all packs of a step at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from lemma.core.ranks import gather_over_ranks, world_size
from lemma.objectives.objective import Loss, Objective, Terms


class Sums:
    """Losses and metrics of packs, kept on the device until they are read back, once, and added in the order of packs.

    A pack that several ranks add is the same on all of them and counts once.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._sums: dict[int, dict[str, torch.Tensor]] = {}
        self._maxima: dict[int, dict[str, torch.Tensor]] = {}

    def add(self, number: int, loss: Loss) -> None:
        pairs = {"loss": (loss.value.detach(), 0.0), **loss.metrics}
        self._sums[number] = {
            name: torch.stack([self._number(x) for x in (value, count)]) for name, (value, count) in pairs.items()
        }
        self._maxima[number] = {name: value.detach().to(torch.float64) for name, value in loss.maxima.items()}

    def _number(self, x: torch.Tensor | float) -> torch.Tensor:
        """A number, made on the device: a copy from the host would wait for all that the device has to do."""
        if isinstance(x, torch.Tensor):
            return x.detach().to(self._device, torch.float64)
        return torch.full((), x, dtype=torch.float64, device=self._device)

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


def evaluate_batch(leaves: Mapping[int, Terms], objective: Objective, summed: Sums) -> None:
    """Evaluate an objective once on the packs of all ranks. Afterwards the leaves hold what the loss pulls on them."""
    parts = dict(leaves)
    if world_size() > 1:
        everybody = gather_over_ranks(_constants(leaves), "the scores of a batch")
        parts = {number: part for of_rank in everybody for number, part in of_rank.items()} | parts
    if not parts:
        return
    device = next(iter(leaves.values())).logprobs_N.device if leaves else None
    loss = objective(_join([parts[number] for number in sorted(parts)], device))
    summed.add(0, loss)
    if loss.value.requires_grad:
        loss.value.backward()


def _constants(parts: Mapping[int, Terms]) -> dict[int, Terms]:
    """The same numbers on the host, for other ranks to look at."""

    def still(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().cpu() for name, tensor in tensors.items()}

    return {
        number: Terms(
            logprobs_N=part.logprobs_N.detach().cpu(),
            entropy_N=None if part.entropy_N is None else part.entropy_N.detach().cpu(),
            sequence_N=part.sequence_N.cpu(),
            unit_B=part.unit_B.cpu(),
            totals=part.totals,
            tokens=still(part.tokens),
            fields=still(part.fields),
        )
        for number, part in parts.items()
    }


def _join(parts: Sequence[Terms], device: torch.device | None) -> Terms:
    """The terms of several packs as one; sequences are numbered through."""

    def cat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([tensor.to(device) for tensor in tensors])

    shifts = np.cumsum([0, *(part.sequences for part in parts)])
    entropies = [part.entropy_N for part in parts if part.entropy_N is not None]
    return Terms(
        logprobs_N=cat([part.logprobs_N for part in parts]),
        entropy_N=cat(entropies) if entropies else None,
        sequence_N=cat([part.sequence_N + int(s) for part, s in zip(parts, shifts, strict=False)]),
        unit_B=cat([part.unit_B for part in parts]),
        totals=parts[0].totals,
        tokens={name: cat([part.tokens[name] for part in parts]) for name in parts[0].tokens},
        fields={name: cat([part.fields[name] for part in parts]) for name in parts[0].fields},
    )


def pull(terms: Terms, leaves: Terms, scale: float) -> None:
    """Back-propagate through one pack what the loss pulls on its log-probabilities and entropies."""
    pairs = [(terms.logprobs_N, leaves.logprobs_N.grad)]
    if terms.entropy_N is not None and leaves.entropy_N is not None:
        pairs.append((terms.entropy_N, leaves.entropy_N.grad))
    wanted = [(out, grad * scale) for out, grad in pairs if grad is not None and grad.numel()]
    if wanted:
        torch.autograd.backward([out for out, _ in wanted], [grad for _, grad in wanted])
