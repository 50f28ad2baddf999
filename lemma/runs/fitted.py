"""Fits a stage into a device by the memory plan: what is sharded, how many tokens are computed at a time, and the cache
of an engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lemma.core.files import from_json
from lemma.core.ranks import gather_over_ranks, slots, slots_of_one, world_size
from lemma.engines.engine_options import NativeOptions
from lemma.learning.learning_options import MOMENTS, BudgetOptions, OptimOptions
from lemma.learning.optimiser import Split
from lemma.models.fitting import fit_update, host_budget, host_memory
from lemma.models.load_model import pick_precision
from lemma.models.memory import Shape, plan_training
from lemma.models.model_options import ModelOptions, Precision
from lemma.models.places import TINY, resolve
from lemma.models.policy import Policy
from lemma.runs.run_checks import split_refusal

if TYPE_CHECKING:
    from lemma.runs.run_options import RecipeLike, StageOptions
    from lemma.runs.stage import Stage

# Share of a GPU's memory that an update may fill, and the smallest pack size worth computing.
MEMORY_SHARE, FEWEST_TOKENS = 0.85, 2048
# The same with the cache of an engine.
SHARE_WITH_CACHE = 0.92


def what_to_split(recipe: RecipeLike, name: str, device: torch.device, start: Path | None) -> Split:
    """What the learners of the stage of this name shard, for a model loaded from the folder `start` or as the recipe
    says. Where the recipe leaves it open, the weights may be sharded too, if the stage can do with that."""
    cluster, model = recipe.cluster, recipe.model
    if cluster.shard == "weights":
        return "weights" if world_size() > 1 else "none"
    if cluster.shard != "auto":
        return cluster.shard
    if world_size() == 1 or device.type != "cuda":
        return "none"
    shape = _shape_of_files(model, start)
    if shape is None:
        return "optimiser"
    memory = torch.cuda.get_device_properties(device).total_memory
    precision = pick_precision(model.precision, device)
    can_split = split_refusal(cluster, model, name, recipe.stages[name]) is None
    return least_split(shape, model, precision, memory, world_size(), can_split, slots_of_one())


def least_split(
    shape: Shape,
    model: ModelOptions,
    precision: Precision,
    memory: float,
    ranks: int,
    can_split: bool = False,
    slots: int = 1,
) -> Split:
    """The optimiser state, which costs nothing to shard; gradients too if that does not fit; then the weights, if
    possible. A rank has at most `slots` slots."""

    def fits(shard: Split) -> bool:
        layout: dict[str, Any] = {"ranks": ranks, "slots": slots, "shard": shard, "recomputed": shape.layers}
        plan = plan_training(shape, model, precision, FEWEST_TOKENS, **layout)
        return plan.total <= MEMORY_SHARE * memory

    if fits("optimiser"):
        return "optimiser"
    return "weights" if can_split and not fits("gradients") else "gradients"


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
        with_engine=with_engine and not _samples_elsewhere(stage) and stage.shard != "weights",
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


def _samples_elsewhere(stage: Stage) -> bool:
    """Whether the native engine has GPUs of its own."""
    engine = getattr(getattr(stage.options, "rollout", None), "engine", None)
    return isinstance(engine, NativeOptions) and engine.has_own_devices and not engine.shares_gpu


def cache_tokens(stage: Stage, options: StageOptions, policy: Policy, needed: int, budget: int) -> int:
    """Tokens that the cache holds: as many as needed, or as many as the update's memory plan leaves room for."""
    if policy.device.type != "cuda":
        return needed
    from lemma.engines.native.engine import BLOCK
    from lemma.engines.native.sizes import bytes_per_token

    try:
        shape = Shape.of_config(policy.causal.config.to_dict())
    except KeyError:  # the update's memory needs are unknown: leave it half of what is free
        free, _ = torch.cuda.mem_get_info(policy.device)
        return max(BLOCK, min(needed, int(free / 2 // bytes_per_token(policy))))
    precision = pick_precision(stage.model.precision, policy.device)
    plan = options.plan_update(
        shape, stage.model, precision, budget, has_adapter=policy.is_adapter,
        ranks=world_size(), slots=slots_of_one(), shard=stage.shard, recomputed=policy.recomputed,
    )  # fmt: skip
    room = torch.cuda.get_device_properties(policy.device).total_memory * SHARE_WITH_CACHE - plan.total
    return max(BLOCK, min(needed, int(room // bytes_per_token(policy))))


def _shape(policy: Policy) -> Shape | None:
    """The shape of a standard decoder; None if its memory needs are unknown."""
    try:
        shape = Shape.of_config(policy.causal.config.to_dict())
        return shape if shape.parameters else None
    except (KeyError, TypeError):
        return None


def _shape_of_files(model: ModelOptions, start: Path | None) -> Shape | None:
    if start is None and model.path == TINY:
        return Shape.of_tiny(model.tiny)
    try:
        place = start or Path(resolve(model.path))
        return Shape.of_config(from_json((place / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError):
        return None
