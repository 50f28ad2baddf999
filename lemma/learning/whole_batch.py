"""An objective that needs all packs of a step at once: evaluated once, then pulled back through each pack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from lemma.core.ranks import gather_over_ranks, world_size
from lemma.learning.passes import Sums
from lemma.objectives.objective import Objective, Terms


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
