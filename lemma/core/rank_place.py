"""What the environment says about this process among the others, before they have met."""

from __future__ import annotations

import os
from dataclasses import dataclass

from lemma.core.errors import UserError


@dataclass(frozen=True)
class RankPlace:
    """One rank among all, and among those of its machine."""

    rank: int
    size: int
    local_rank: int
    local_size: int


def place_of() -> RankPlace | None:
    """This rank; None where nobody said that there are others."""
    size = number_of_environment("WORLD_SIZE", "1")
    if size < 2:
        return None
    rank = number_of_environment("RANK")
    if not 0 <= rank < size:
        raise UserError(f"RANK is {rank}, and WORLD_SIZE is {size}", fix="start with torchrun, or remove WORLD_SIZE")
    return RankPlace(
        rank, size, number_of_environment("LOCAL_RANK", "0"), number_of_environment("LOCAL_WORLD_SIZE", "1")
    )


def number_of_environment(name: str, default: str | None = None) -> int:
    """A number of the environment."""
    text = os.environ.get(name, default)
    try:
        return int(text or "")
    except ValueError:
        is_there = "is missing" if text is None else f"is '{text}', not a number"
        raise UserError(
            f"{name} {is_there} in the environment", fix="start with torchrun, or remove WORLD_SIZE"
        ) from None
