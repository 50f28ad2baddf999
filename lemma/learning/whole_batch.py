"""Adding up what an objective finds: over packs, and for an objective that needs all packs of a step at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from lemma.core.ranks import gather_over_ranks, rank, world_size
from lemma.objectives.objective import Loss, Objective, Terms


class Sums:
    """Adds up losses and metrics on the device; reads them back once."""

    def __init__(self, device: torch.device):
        self._device = device
        self._sums: dict[str, torch.Tensor] = {}
        self._maxima: dict[str, torch.Tensor] = {}

    def add(self, loss: Loss) -> None:
        self._put("loss", loss.value.detach(), 0.0)
        for name, (value, count) in loss.metrics.items():
            self._put(name, value, count)
        for name, value in loss.maxima.items():
            largest = value.detach().to(torch.float64)
            self._maxima[name] = torch.maximum(self._maxima[name], largest) if name in self._maxima else largest

    def _put(self, name: str, value: torch.Tensor | float, count: torch.Tensor | float) -> None:
        pair = torch.stack([self._number(x) for x in (value, count)])
        self._sums[name] = self._sums[name] + pair if name in self._sums else pair

    def _number(self, x: torch.Tensor | float) -> torch.Tensor:
        """A number, made on the device: a copy from the host would wait for all that the device has to do."""
        if isinstance(x, torch.Tensor):
            return x.detach().to(self._device, torch.float64)
        return torch.full((), x, dtype=torch.float64, device=self._device)

    def result(self) -> dict[str, float]:
        """Sums over ranks, each divided by its count, and maxima; the loss is a sum already."""
        names = sorted(self._sums)
        table = torch.stack([self._sums[name] for name in names]).tolist() if names else []
        everybody = gather_over_ranks(dict(zip(names, table, strict=True)))
        result = {"loss": 0.0}
        for name in sorted({name for sums in everybody for name in sums}):
            value, count = (sum(sums[name][i] for sums in everybody if name in sums) for i in (0, 1))
            result[name] = value if name == "loss" else value / count if count else 0.0
        for found in gather_over_ranks({name: value.item() for name, value in self._maxima.items()}):
            for name, value in found.items():
                result[name] = max(value, result.get(name, value))
        return result


def evaluate_batch(leaves: Sequence[Terms], objective: Objective, summed: Sums) -> None:
    """Evaluate an objective once on the packs of all ranks. Afterwards the leaves hold what the loss pulls on them.

    Every rank computes the same loss; the first one counts it.
    """
    parts = gather_over_ranks(_constants(leaves)) if world_size() > 1 else [[]]
    parts[rank()] = list(leaves)
    everything = [part for of_rank in parts for part in of_rank]
    if not everything:
        return
    loss = objective(_join(everything, leaves[0].logprobs_N.device if leaves else None))
    if rank() == 0:
        summed.add(loss)
    if loss.value.requires_grad:
        loss.value.backward()


def _constants(parts: Sequence[Terms]) -> list[Terms]:
    """The same numbers on the host, for other ranks to look at."""

    def still(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().cpu() for name, tensor in tensors.items()}

    return [
        Terms(
            logprobs_N=part.logprobs_N.detach().cpu(),
            entropy_N=None if part.entropy_N is None else part.entropy_N.detach().cpu(),
            sequence_N=part.sequence_N.cpu(),
            unit_B=part.unit_B.cpu(),
            totals=part.totals,
            tokens=still(part.tokens),
            fields=still(part.fields),
        )
        for part in parts
    ]


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
