"""How many processes share this run, and sums over them. One process is a world of size one and needs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


def _active() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if _active() else 0


def world_size() -> int:
    import torch.distributed as dist

    return dist.get_world_size() if _active() else 1


def sum_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """Add a tensor up over all ranks, in place; every rank must call this the same number of times."""
    import torch.distributed as dist

    if _active():
        dist.all_reduce(tensor)
    return tensor


def gather_over_ranks(value: T) -> list[T]:
    """What every rank gives, in the order of ranks; meant for few bytes. Every rank must call this alike."""
    import torch.distributed as dist

    if not _active():
        return [value]
    everything: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everything, value)
    return everything  # type: ignore[return-value]


def join_over_ranks(parts: Sequence[T]) -> tuple[list[T], slice]:
    """The parts of all ranks one after the other, and where this rank's own stand among them."""
    everything = gather_over_ranks(list(parts))
    first = sum(len(of_rank) for of_rank in everything[: rank()])
    return [part for of_rank in everything for part in of_rank], slice(first, first + len(parts))


def add_over_ranks(*numbers: float) -> list[float]:
    """Numbers added up over all ranks, in the order of ranks: every rank finds the same."""
    return [sum(column) for column in zip(*gather_over_ranks(numbers), strict=True)]
