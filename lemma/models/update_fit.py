"""How an update fits into a GPU's memory: how many tokens are computed at a time, and which blocks are computed twice.

Large packs keep a GPU busy, since every pack costs the host the same; recomputation costs a quarter of the time. So the
largest budget without recomputation is taken, then as few recomputed blocks as fit, then smaller packs.
"""

from __future__ import annotations

from dataclasses import dataclass

from lemma.models.memory import Shape, plan_training
from lemma.models.model_options import ModelOptions, Precision

# Of the device's memory: an update alone, and one that leaves room for an engine's cache.
ALONE, WITH_ENGINE = 0.85, 0.6
BUDGETS = (65536, 32768, 16384, 8192)
USUAL, LEAST = 16384, 2048
SMALLER = (USUAL, 8192, 4096, LEAST)


@dataclass(frozen=True)
class UpdateFit:
    """Tokens at a time, and how many of the model's blocks are recomputed."""

    token_budget: int
    recomputed: int


def fit_update(
    shape: Shape,
    model: ModelOptions,
    precision: Precision,
    memory: float,
    *,
    token_budget: int | None = None,
    with_engine: bool = False,
    moments: float = 8.0,
    critic: bool = False,
    reference: bool = False,
    ranks: int = 1,
    slots: int = 1,
    shard: str = "none",
) -> UpdateFit:
    """What fits into `memory` bytes by the plan; the smallest where nothing does. What the options say stays."""
    room = memory * (WITH_ENGINE if with_engine else ALONE)

    def fits(budget: int, recomputed: int, room: float = room) -> bool:
        plan = plan_training(
            shape, model, precision, budget,
            moments=moments, ranks=ranks, slots=slots, shard=shard, recomputed=recomputed,
        )  # fmt: skip
        return plan.beside(critic=critic, reference=reference).total <= room

    budgets = BUDGETS if token_budget is None else (token_budget,)
    counts = range(shape.layers + 1) if model.checkpointing is None else [shape.layers * model.checkpointing]
    for budget in budgets:
        if fits(budget, counts[0]):
            return UpdateFit(budget, counts[0])
    for count in counts:
        if fits(token_budget or USUAL, count):
            return UpdateFit(token_budget or USUAL, count)
    if token_budget is not None:
        return UpdateFit(token_budget, counts[-1])
    # Small packs save little of what weights and optimiser take: where these leave an engine less, it gets the rest.
    for most in (room, memory * ALONE):
        for budget in SMALLER:
            if fits(budget, counts[-1], most):
                return UpdateFit(budget, counts[-1])
    return UpdateFit(LEAST, counts[-1])
