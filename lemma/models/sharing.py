"""Prompts that several sequences of a pack begin with are computed once.

The samples of one problem share its prompt, the two answers of a pair share their question. In a pack that shares, the
first sequence of such a family brings the prompt, and the others bring only what follows it. Attention is the one place
where they need it: their queries see the prompt's keys and values, which are repeated there (`Sharing.spread`). The
arithmetic is that of separate sequences; gradients of the repeated rows are added up in a fixed order.

Shapes: T rows of a pack, K tokens of its sequences written out one after the other (K > T where something is shared).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lemma.core.types import Trajectory

# Shorter prompts are not worth the bookkeeping.
SHORTEST = 8


def prompt_length(trajectory: Trajectory) -> int:
    """Tokens before the first one that is learnt. One that learns nothing shares nothing."""
    first = int(trajectory.chosen_T.argmax())
    return first if trajectory.chosen_T[first] else 0


def families(trajectories: Sequence[Trajectory], indices: Sequence[int]) -> list[list[int]]:
    """The trajectories that begin with the same prompt, in the order in which the first of each family came."""
    by_prompt: dict[Any, list[int]] = {}
    for index in indices:
        length = prompt_length(trajectories[index])
        prompt = np.ascontiguousarray(trajectories[index].ids_T[:length]).tobytes()
        by_prompt.setdefault((length, prompt) if length >= SHORTEST else index, []).append(index)
    return list(by_prompt.values())


def shared_size(trajectories: Sequence[Trajectory], members: Sequence[int]) -> int:
    """Rows of a pack that these take together."""
    size = 0
    for family in families(trajectories, members):
        saved = prompt_length(trajectories[family[0]]) * (len(family) - 1)
        size += sum(len(trajectories[i]) for i in family) - saved
    return size


def split_family(trajectories: Sequence[Trajectory], family: Sequence[int], budget: int) -> list[list[int]]:
    """A family in parts that fit into a pack, each with a prompt of its own."""
    prompt = prompt_length(trajectories[family[0]])
    parts: list[list[int]] = []
    room = 0
    for index in family:
        tail = len(trajectories[index]) - prompt
        if not parts or tail > room:
            parts.append([])
            room = budget - prompt
        parts[-1].append(index)
        room -= tail
    return parts


def rows_of(trajectories: Sequence[Trajectory], ordered: Sequence[int]) -> tuple[np.ndarray, list[int]]:
    """The row (K,) of each token of these sequences, in a pack where families stand together, and how many rows each
    sequence brings itself."""
    rows: list[np.ndarray] = []
    own: list[int] = []
    filled = 0
    for family in families(trajectories, ordered):
        prompt = prompt_length(trajectories[family[0]]) if len(family) > 1 else 0
        start = filled
        for number, index in enumerate(family):
            length = len(trajectories[index])
            kept = length if number == 0 else length - prompt
            front = np.arange(start, start + length - kept)
            rows.append(np.concatenate([front, np.arange(filled, filled + kept)]))
            own.append(kept)
            filled += kept
    return np.concatenate(rows), own


@dataclass(frozen=True, eq=False)
class Sharing:
    """Which row of the pack each token of its written-out sequences is, and the way back for gradients.

    `once_*` are rows that one token reads; `often_UG` are the tokens that read each of the rows `often_U`, and
    `weight_UG` is 0 where there are fewer than G.
    """

    rows_K: torch.Tensor
    first_T: torch.Tensor
    once_rows: torch.Tensor
    once_tokens: torch.Tensor
    often_U: torch.Tensor
    often_UG: torch.Tensor
    weight_UG: torch.Tensor

    @classmethod
    def of(cls, rows_K: np.ndarray, put: Any) -> Sharing:
        order = np.argsort(rows_K, kind="stable")
        rows, starts, counts = np.unique(rows_K[order], return_index=True, return_counts=True)
        often = counts > 1
        most = int(counts.max())
        place = starts[often][:, None] + np.arange(most)[None, :]
        inside = np.arange(most)[None, :] < counts[often][:, None]
        readers = order[np.minimum(place, len(order) - 1)]
        return cls(
            rows_K=put(rows_K),
            first_T=put(order[starts]),
            once_rows=put(rows[~often]),
            once_tokens=put(order[starts[~often]]),
            often_U=put(rows[often]),
            often_UG=put(np.where(inside, readers, 0)),
            weight_UG=put(inside.astype(np.float32), torch.float32),
        )

    def spread(self, x_THD: torch.Tensor) -> torch.Tensor:
        """(T, H, D) to (K, H, D): each sequence written out in full."""
        return _Spread.apply(x_THD, self)

    def gather(self, x_KHD: torch.Tensor) -> torch.Tensor:
        """(K, H, D) back to (T, H, D), where every reader of a row has the same."""
        return x_KHD.index_select(0, self.first_T)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_THD: torch.Tensor, sharing: Sharing) -> torch.Tensor:
        ctx.sharing, ctx.rows = sharing, len(x_THD)
        return x_THD.index_select(0, sharing.rows_K)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        sharing, grad_KHD = ctx.sharing, grads[0]
        result = grad_KHD.new_empty((ctx.rows, *grad_KHD.shape[1:]))
        result[sharing.once_rows] = grad_KHD.index_select(0, sharing.once_tokens)
        wide = grad_KHD.dtype if grad_KHD.dtype == torch.float64 else torch.float32
        read = grad_KHD[sharing.often_UG].to(wide) * sharing.weight_UG[..., None, None].to(wide)
        result[sharing.often_U] = read.sum(1).to(grad_KHD.dtype)
        return result, None


def can_share(module: torch.nn.Module) -> bool:
    """Whether attention is all that lets tokens see each other: a convolution over tokens would not find the prompt."""
    return not any(isinstance(part, torch.nn.Conv1d) for part in module.modules())
