"""Passes where the weights are split: the ranks pass through the model together.

One with fewer packs makes empty passes. Memory cannot run out on one rank alone then: the others would wait for it
inside a pass. So the budget follows the memory plan, the largest pack comes first, and where memory runs out all the
same, all ranks end with one sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch

from lemma.core.errors import UserError
from lemma.core.rank_objects import in_step
from lemma.core.ranks import gather_over_ranks, rank, slots_of, world_size
from lemma.core.types import Trajectory
from lemma.learning.passes import deal_packs
from lemma.models.packing import TokenBatch
from lemma.models.policy import PackModel

T = TypeVar("T")


def pass_together(
    work: Callable[[], T],
    place: str,
    policy: PackModel,
    packs: Sequence[Sequence[int]],
    trajectories: Sequence[Trajectory],
    learns: bool,
) -> list[T]:
    """Have each rank compute its own packs, and as many empty passes as it has fewer packs than the busiest."""
    passes = _passes_of_ranks(packs, trajectories)
    with in_step(place):
        try:
            mine = work()
            for _ in range(max(passes) - passes[rank()]):
                _pass_empty(policy, learns)
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"rank {rank()} ran out of memory, and with `shard: weights` a step is not repeated with smaller packs",
                fix="lower batch.token_budget, or write `model.checkpointing: true`",
            ) from error
    return gather_over_ranks(mine, place)


def first_pass(policy: PackModel) -> None:
    """Where weights are split, try every kernel on this device: a probe has seen the model in host memory only."""
    if policy.is_split:
        policy.module.eval()
        with in_step("the first pass"):
            _pass_empty(policy, learns=False)


def _passes_of_ranks(packs: Sequence[Sequence[int]], trajectories: Sequence[Trajectory]) -> list[int]:
    """How many packs of each rank go through the model: those with something to predict."""
    counts = [
        sum(any(trajectories[i].trained_tokens for i in packs[number]) for number in of_slot)
        for of_slot in deal_packs(packs, trajectories)
    ]
    return [sum(counts[slot] for slot in slots_of(other)) for other in range(world_size())]


def _pass_empty(policy: PackModel, learns: bool) -> None:
    """A pass over two tokens whose gradient is zero."""
    nothing = Trajectory(np.zeros(2, dtype=np.int64), np.array([False, True]))
    batch = TokenBatch.build([nothing], [0], policy.device)
    with torch.set_grad_enabled(learns):
        (output,) = policy.outputs(batch, policy.gives[:1]).values()
        if learns:
            (output.sum() * 0.0).backward()
