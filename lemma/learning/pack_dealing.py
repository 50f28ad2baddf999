"""Who computes which pack, and passes in lock step.

Ranks that hold parts of the weights pass through the model together. One with fewer packs makes empty passes. Memory
cannot run out on one rank alone then: the others would wait for it inside a pass. So the budget follows the memory
plan, the largest pack comes first, and where memory runs out all the same, all ranks end with one sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch

from lemma.core.errors import UserError
from lemma.core.ranks import gather_over_ranks, in_step, rank, slots, slots_of, together, world_size
from lemma.core.types import Scope, Trajectory
from lemma.learning.parameter_pieces import deal
from lemma.models.critic import Critic
from lemma.models.packing import TokenBatch
from lemma.models.policy import Policy

T = TypeVar("T")


def deal_packs(packs: Sequence[Sequence[int]], trajectories: Sequence[Trajectory]) -> list[list[int]]:
    """The numbers of the packs of each slot, in order."""
    hands = deal([sum(len(trajectories[i]) for i in pack) for pack in packs], slots())
    return [[number for number, hand in enumerate(hands) if hand == slot] for slot in range(slots())]


def by_all_ranks(
    work: Callable[[], T],
    place: str,
    policy: Policy | Critic,
    packs: Sequence[Sequence[int]],
    trajectories: Sequence[Trajectory],
    *,
    learns: bool = False,
) -> list[T]:
    """Have each rank compute its own packs; what all of them found. With `learns`, passes go backward too.

    Where weights are split, a rank adds as many empty passes as it has fewer packs than the busiest.
    """
    if not policy.is_split:
        return together(work, place)
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


def first_pass(policy: Policy | Critic) -> None:
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


def _pass_empty(policy: Policy | Critic, learns: bool) -> None:
    """A pass over two tokens whose gradient is zero."""
    nothing = Trajectory(np.zeros(2, dtype=np.int64), np.array([False, True]))
    batch = TokenBatch.build([nothing], [0], policy.device)
    with torch.set_grad_enabled(learns):
        values, _ = policy.logprobs(batch)
        if learns:
            (values.sum() * 0.0).backward()


def is_one_unit(trajectories: Sequence[Trajectory], scope: Scope) -> bool:
    """Whether the packer cannot take these apart."""
    return len({t.unit for t in trajectories}) == 1 if scope == "pair" else len(trajectories) == 1
