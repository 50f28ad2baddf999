"""Fits an update into the device's memory, using the memory plan."""

from __future__ import annotations

import torch

from lemma.core.host_memory import host_memory
from lemma.core.ranks import gather_over_ranks, slots, slots_of_one, speakers, world_size
from lemma.learning.learning_options import MOMENTS, BudgetOptions, OptimOptions
from lemma.models.fitting import host_budget
from lemma.models.load_model import pick_precision
from lemma.models.memory import Shape
from lemma.models.policy import Policy
from lemma.models.update_fit import fit_update
from lemma.runs.stage import Stage


def fit_budget(
    stage: Stage,
    policy: Policy,
    batch: BudgetOptions,
    optim: OptimOptions,
    *,
    with_engine: bool = False,
) -> int:
    """How many tokens to compute at a time; ranks agree on the minimum of what each has room for.

    If memory requires it, this turns on gradient checkpointing for blocks of the policy.
    """
    model, device = stage.model, policy.device
    shape = _shape(policy) if device.type in ("cuda", "cpu") else None
    if shape is None:
        return batch.planned_budget
    precision, moments = pick_precision(model.precision, device), MOMENTS[optim.name]
    beside = stage.options.models_beside(has_adapter=policy.is_adapter)
    if device.type == "cpu":
        if batch.token_budget is not None:
            return batch.token_budget
        # Per slot, so that any number of ranks computes the same packs.
        memory = host_memory() / max(slots(), world_size())
        room = host_budget(shape, model, precision, memory, moments=moments, **beside)
        found = min(gather_over_ranks(room))
        if found < batch.planned_budget:
            stage.say(f"by the memory plan: {found} tokens at a time")
        return found
    fit = fit_update(
        shape,
        model,
        precision,
        torch.cuda.get_device_properties(device).total_memory,
        token_budget=batch.token_budget,
        with_engine=with_engine and speakers() is None and stage.shard != "weights",
        moments=moments,
        **beside,
        ranks=world_size(),
        slots=slots_of_one(),
        shard=stage.shard,
    )
    policy.recompute(fit.recomputed)
    if batch.token_budget is None or (fit.recomputed and model.checkpointing is None):
        again = f", {fit.recomputed} of {shape.layers} blocks recomputed" if fit.recomputed else ""
        stage.say(f"by the memory plan: {fit.token_budget} tokens at a time{again}")
    return min(gather_over_ranks(fit.token_budget))


def _shape(policy: Policy) -> Shape | None:
    """The shape of a standard decoder; None if its memory needs are unknown."""
    try:
        shape = Shape.of_config(policy.causal.config.to_dict())
        return shape if shape.parameters else None
    except (KeyError, TypeError):
        return None
