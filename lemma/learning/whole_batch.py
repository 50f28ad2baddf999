"""An objective that needs all packs of a step at once: evaluated once, then pulled back through each pack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
import torch

from lemma.core.ranks import gather_over_ranks, world_size
from lemma.learning.passes import Sums
from lemma.objectives.objective import LossInputs, Objective

Name = TypeVar("Name", bound=str)


def evaluate_batch(leaves: Mapping[int, LossInputs], objective: Objective, summed: Sums) -> None:
    """Evaluate an objective once on the packs of all ranks. Afterwards the leaves hold what the loss pulls on them."""
    parts = dict(leaves)
    if world_size() > 1:
        everybody = gather_over_ranks(_constants(leaves), "the scores of a batch")
        parts = {number: part for of_rank in everybody for number, part in of_rank.items()} | parts
    if not parts:
        return
    device = next(iter(leaves.values())).sequence_N.device if leaves else None
    loss = objective(_join([parts[number] for number in sorted(parts)], device))
    summed.add(0, loss)
    if loss.value.requires_grad:
        loss.value.backward()


def _constants(parts: Mapping[int, LossInputs]) -> dict[int, LossInputs]:
    """The same numbers on the host, for other ranks to look at."""

    def still(tensors: Mapping[Name, torch.Tensor]) -> dict[Name, torch.Tensor]:
        return {name: tensor.detach().cpu() for name, tensor in tensors.items()}

    return {
        number: LossInputs(
            outputs=still(part.outputs),
            sequence_N=part.sequence_N.cpu(),
            group_B=part.group_B.cpu(),
            totals=part.totals,
            tokens=still(part.tokens),
            fields=still(part.fields),
        )
        for number, part in parts.items()
    }


def _join(parts: Sequence[LossInputs], device: torch.device | None) -> LossInputs:
    """The terms of several packs as one; sequences are numbered through."""

    def cat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([tensor.to(device) for tensor in tensors])

    def together(named: Sequence[Mapping[Name, torch.Tensor]]) -> dict[Name, torch.Tensor]:
        return {name: cat([tensors[name] for tensors in named]) for name in named[0]}

    shifts = np.cumsum([0, *(part.sequences for part in parts)])
    return LossInputs(
        outputs=together([part.outputs for part in parts]),
        sequence_N=cat([part.sequence_N + int(s) for part, s in zip(parts, shifts, strict=False)]),
        group_B=cat([part.group_B for part in parts]),
        totals=parts[0].totals,
        tokens=together([part.tokens for part in parts]),
        fields=together([part.fields for part in parts]),
    )


def pull(terms: LossInputs, leaves: LossInputs, scale: float) -> None:
    """Back-propagate through one pack what the loss pulls on its outputs."""
    pairs = [(output, leaves.outputs[name].grad) for name, output in terms.outputs.items()]
    wanted = [(out, grad * scale) for out, grad in pairs if grad is not None and grad.numel()]
    if wanted:
        torch.autograd.backward([out for out, _ in wanted], [grad for _, grad in wanted])
