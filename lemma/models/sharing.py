"""Prompts that several sequences of a pack begin with are computed once.

The samples of one problem share its prompt, the two answers of a pair share their question. In a pack that shares, the
first sequence of such a family brings the prompt, and the others bring only what follows it. Attention is the one place
where they need it: their queries see the prompt's keys and values, which are repeated there (`Sharing.spread`). The
arithmetic is that of separate sequences; gradients of the repeated rows are added up in a fixed order.

What is written out takes memory in every layer, so a pack counts it: a token that is only written out costs a share of
a row (`spread_cost`), and rows and these together stay within the budget.

Shapes: T rows of a pack, K tokens of its sequences written out one after the other (K > T where something is shared).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lemma.core.types import Trajectory
from lemma.models.memory import Shape

# Shorter prompts are not worth the bookkeeping.
SHORTEST = 8
# The cost of a token that is written out, for models whose shape is not known: more than most have. And the least: a
# pack writes out no more than 16 times its budget, and kernels that count numbers in 32 bits hold it.
USUAL_COST, LEAST_COST = 1 / 8, 1 / 16
# What is gathered at a time to add up gradients.
SUM_BYTES = 2**28


def spread_cost(config: Any, dtype: torch.dtype, device: torch.device) -> float:
    """Memory of a token of a prompt that is written out once more, as a share of what a row of a pack takes."""
    text = config.get_text_config()
    is_half = dtype in (torch.bfloat16, torch.float16)
    by_kernel = is_half and device.type == "cuda" and getattr(text, "attn_logit_softcapping", None) is None
    try:
        return max(LEAST_COST, Shape.of_config(text.to_dict()).spread_cost(by_kernel))
    except KeyError:
        return USUAL_COST


def prompt_length(trajectory: Trajectory) -> int:
    """Tokens before the first one that is learnt. One that learns nothing shares nothing."""
    first = int(trajectory.loss_mask_T.argmax())
    return first if trajectory.loss_mask_T[first] else 0


def families(trajectories: Sequence[Trajectory], indices: Sequence[int]) -> list[list[int]]:
    """The trajectories that begin with the same prompt, in the order in which the first of each family came. One that
    brings more than ids shares nothing."""
    by_prompt: dict[Any, list[int]] = {}
    for index in indices:
        if trajectories[index].model_inputs:
            by_prompt[index] = [index]
            continue
        length = prompt_length(trajectories[index])
        prompt = np.ascontiguousarray(trajectories[index].ids_T[:length]).tobytes()
        by_prompt.setdefault((length, prompt) if length >= SHORTEST else index, []).append(index)
    return list(by_prompt.values())


def shared_size(trajectories: Sequence[Trajectory], members: Sequence[int], cost: float = 0.0) -> int:
    """Rows of a pack that these take together, and what is written out beside them at its `cost`."""
    return sum(family_size(trajectories, family, cost) for family in families(trajectories, members))


def family_size(trajectories: Sequence[Trajectory], family: Sequence[int], cost: float = 0.0) -> int:
    """`shared_size` of one family."""
    whole = sum(len(trajectories[i]) for i in family)
    if len(family) == 1:
        return whole
    prompt = prompt_length(trajectories[family[0]])
    return whole - (prompt - _written(prompt, cost)) * (len(family) - 1)


def split_family(
    trajectories: Sequence[Trajectory], family: Sequence[int], budget: int, cost: float = 0.0
) -> list[list[int]]:
    """A family in parts that fit into a pack, each with a prompt of its own."""
    prompt = prompt_length(trajectories[family[0]])
    parts: list[list[int]] = []
    room = 0
    for index in family:
        tail = len(trajectories[index]) - prompt
        if not parts or tail + _written(prompt, cost) > room:
            parts.append([])
            room = budget - prompt + _written(prompt, cost)
        parts[-1].append(index)
        room -= tail + _written(prompt, cost)
    return parts


def _written(prompt: int, cost: float) -> int:
    """What a pack counts for one more sequence that reads this prompt."""
    return math.ceil(prompt * cost)


def rows_of(trajectories: Sequence[Trajectory], related: Sequence[Sequence[int]]) -> tuple[np.ndarray, list[int]]:
    """The row (K,) of each token of these families, in a pack where they stand one after the other, and how many rows
    each sequence brings itself."""
    rows: list[np.ndarray] = []
    own: list[int] = []
    filled = 0
    for family in related:
        prompt = prompt_length(trajectories[family[0]]) if len(family) > 1 else 0
        front = np.arange(filled, filled + prompt)
        for number, index in enumerate(family):
            kept = len(trajectories[index]) - (prompt if number else 0)
            if number:
                rows.append(front)
            rows.append(np.arange(filled, filled + kept))
            own.append(kept)
            filled += kept
    return np.concatenate(rows), own


@dataclass(frozen=True, eq=False)
class Sharing:
    """Which row of the pack each token of its written-out sequences is, and the way back for gradients.

    CSR layout: the readers of row t are `readers_K[starts_T1[t]:starts_T1[t+1]]`, in pack order.
    """

    rows_K: torch.Tensor
    readers_K: torch.Tensor
    starts_T1: torch.Tensor

    @classmethod
    def of(cls, rows_K: np.ndarray, put: Any) -> Sharing:
        counts = np.bincount(rows_K)
        return cls(
            rows_K=put(rows_K),
            readers_K=put(np.argsort(rows_K, kind="stable")),
            starts_T1=put(np.concatenate([[0], np.cumsum(counts)])),
        )

    @property
    def first_T(self) -> torch.Tensor:
        """The token that brings each row."""
        return self.readers_K[self.starts_T1[:-1]]

    def spread(self, x_THD: torch.Tensor) -> torch.Tensor:
        """(T, H, D) to (K, H, D): each sequence written out in full."""
        return _Spread.apply(x_THD, self)

    def gather(self, x_KHD: torch.Tensor) -> torch.Tensor:
        """(K, H, D) back to (T, H, D), where every reader of a row has the same."""
        return x_KHD.index_select(0, self.first_T)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_THD: torch.Tensor, sharing: Sharing) -> torch.Tensor:
        ctx.sharing = sharing
        return x_THD.index_select(0, sharing.rows_K)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return sum_over_readers(grads[0], ctx.sharing.readers_K, ctx.sharing.starts_T1), None


# An operator of its own: its loop depends on the pack, and a compiled block would be compiled for every kind of pack.
@torch.library.custom_op("lemma::sum_over_readers", mutates_args=())
def sum_over_readers(grad_KHD: torch.Tensor, readers_K: torch.Tensor, starts_T1: torch.Tensor) -> torch.Tensor:
    """(K, H, D) to (T, H, D): for each row the sum over its readers (see `Sharing`), in a fixed order and at least in
    float32."""
    if grad_KHD.is_cuda and grad_KHD.dtype != torch.float64:
        from lemma.models.sharing_kernels import sum_readers

        return sum_readers(grad_KHD.contiguous(), readers_K, starts_T1)
    return plain_sum_over_readers(grad_KHD, readers_K, starts_T1)


def plain_sum_over_readers(grad_KHD: torch.Tensor, readers_K: torch.Tensor, starts_T1: torch.Tensor) -> torch.Tensor:
    """The same in plain torch: rows with the same number of readers are summed together."""
    counts_T = starts_T1.diff()
    result = grad_KHD.new_empty((len(counts_T), *grad_KHD.shape[1:]))
    wide = grad_KHD.dtype if grad_KHD.dtype == torch.float64 else torch.float32
    at_a_time = max(1, SUM_BYTES // (grad_KHD[:1].numel() * grad_KHD.itemsize))
    for readers in counts_T.unique().tolist():
        rows = (counts_T == readers).nonzero()[:, 0]
        for some in rows.split(max(1, at_a_time // readers)):
            theirs = readers_K[starts_T1[some][:, None] + torch.arange(readers, device=some.device)]
            read = grad_KHD.index_select(0, theirs.flatten()).unflatten(0, theirs.shape)
            result[some] = read[:, 0] if readers == 1 else read.sum(1, dtype=wide).to(grad_KHD.dtype)
    return result


@sum_over_readers.register_fake
def _(grad_KHD: torch.Tensor, readers_K: torch.Tensor, starts_T1: torch.Tensor) -> torch.Tensor:
    return grad_KHD.new_empty((starts_T1.shape[0] - 1, *grad_KHD.shape[1:]))


def can_share(module: torch.nn.Module) -> bool:
    """Whether attention is all that lets tokens see each other: a convolution over tokens would not find the prompt."""
    return not any(isinstance(part, torch.nn.Conv1d) for part in module.modules())
