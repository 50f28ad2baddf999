"""The memory that a stage's optimisation steps take by the plan, without loading a model, and where it is too much."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lemma.core.errors import UserError
from lemma.learning.learning_options import MOMENTS
from lemma.models.fitting import BUDGETS, GPU_BUDGETS, LEAST_BUDGET, host_budget, host_memory
from lemma.models.memory import GIB, SHARDS, MemoryPlan, Shape, plan_server
from lemma.models.model_options import ModelOptions, Precision
from lemma.models.places import find_gguf
from lemma.planning.data_amounts import Amount, amount_of, sequences_of
from lemma.planning.hub_needs import kept_config
from lemma.recipe import Recipe
from lemma.runs.run_options import StageOptions, usual_slots
from lemma.stages.reinforcement.rl_options import ReinforcementOptions


@dataclass(frozen=True)
class Planned:
    """The peak of a step on one rank, the tokens at a time that it is for, and their limit. `host_budget` is the limit
    that a CPU with this machine's memory would have where the recipe names none."""

    memory: MemoryPlan
    tokens: int
    budget: int
    host_budget: int
    precision: Precision


def plan_stage(
    recipe: Recipe, stage: StageOptions, shape: Shape, amount: Amount | None, *, on_cpu: bool, budget: int | None
) -> Planned:
    """The plan of a stage; with `budget` in place of the recipe's where that is given."""
    model, has_adapter = recipe.model, recipe.model.lora is not None
    precision: Precision = "fp32" if on_cpu and model.precision is None else precision_of(model)
    ranks = recipe.cluster.ranks or 1
    slots = usual_slots(recipe, ranks)
    most = stage.batch.planned_budget
    if on_cpu:
        memory = host_memory() / max(slots, ranks)
        beside = stage.models_beside(has_adapter=has_adapter)
        most = host_budget(shape, model, precision, memory, moments=MOMENTS[stage.optim.name], **beside)
    limit = budget or stage.batch.token_budget or most
    tokens = (amount and amount.pack(limit, sequences_of(stage))) or limit
    layout: dict[str, Any] = {"slots": -(-slots // ranks), "on_cpu": on_cpu}
    plan = stage.plan_update(shape, model, precision, tokens, has_adapter=has_adapter, **layout)
    return Planned(plan, tokens, limit, most, precision)


def memory_in_words(recipe: Recipe, stage: StageOptions, amount: Amount | None) -> str:
    """The peak of an optimisation step, where the model's shape can be known without fetching anything."""
    model, shape = recipe.model, shape_of(recipe.model)
    if isinstance(shape, str):
        return shape
    planned = plan_stage(recipe, stage, shape, amount, on_cpu=recipe.run.device == "cpu", budget=None)
    plan, tokens, budget = planned.memory, planned.tokens, planned.budget
    is_open = model.precision is None and recipe.run.device == "auto" and model.path != "tiny"
    told = "; in bf16, as on a GPU" if is_open else ""
    if budget < stage.batch.planned_budget and tokens == budget:
        told += f"; {tokens:,} tokens at a time by the memory of this machine"
    elif amount is not None and amount.lengths:
        whose = "the longest sequence" if max(amount.lengths) >= min(tokens, budget) else "a step's data"
        told += f"; {tokens:,} tokens at a time by {whose if tokens != budget else 'the budget'}"
    if not isinstance(stage, ReinforcementOptions):
        return f"{plan}{told}"
    server = f"of each server {plan_server(shape, model, planned.precision)}; " if stage.native_servers else ""
    return f"{plan}{told}; {server}and the engine's cache, {plan.cache_per_token / 1024:.0f} KiB a token"


def memory_warnings(
    recipe: Recipe,
    names: Sequence[str],
    amounts: Mapping[str, Amount | None] | None = None,
    *,
    has_gpu: bool,
    gpus: Sequence[float] = (),
) -> list[str]:
    """A sentence for each of these stages that needs more than the memory of this machine, where it runs on the CPU, or
    than its `gpus` have, in bytes.

    Where the recipe leaves the device open, a machine without a GPU may only be the one that plans: a budget has to be
    named. Without `amounts`, the data are measured where a pack of the whole budget would be too large.
    """
    shape, device = shape_of(recipe.model), recipe.run.device
    if isinstance(shape, str):
        return []
    if device == "cuda" or (device == "auto" and has_gpu):
        found = [_too_large_for(gpus, recipe, name, shape, (amounts or {}).get(name)) for name in names] if gpus else []
        return [sentence for sentence in found if sentence]
    sentences = []
    for name in names:
        stage = recipe.stages[name]
        if device == "auto" and stage.batch.token_budget is None:
            continue
        amount = amounts.get(name) if amounts is not None else None
        sentence = _too_large(recipe, name, shape, amount)
        if sentence and amounts is None:
            sentence = _too_large(recipe, name, shape, amount_of(recipe, stage))
        sentences += [sentence] if sentence else []
    return sentences


def _too_large(recipe: Recipe, name: str, shape: Shape, amount: Amount | None) -> str | None:
    stage, ranks, memory = recipe.stages[name], recipe.cluster.ranks or 1, host_memory()
    planned = plan_stage(recipe, stage, shape, amount, on_cpu=True, budget=None)
    needed = ranks * planned.memory.total
    if needed <= memory:
        return None
    less = planned.host_budget
    lower = plan_stage(recipe, stage, shape, amount, on_cpu=True, budget=less)
    fix = "take a smaller model or shorter sequences" if recipe.model.lora else "take a smaller model, or `model.lora`"
    if lower.tokens < planned.tokens and ranks * lower.memory.total <= memory:
        fix = f"lower stages.{name}.batch.token_budget to {less}"
    where = "without a GPU, " if recipe.run.device == "auto" else ""
    needs = "needs" if amount is not None and amount.lengths else "needs up to"
    return f"{where}stage {name} {needs} {needed / GIB:.1f} GiB and this machine has {memory / GIB:.1f}; {fix}"


def _too_large_for(gpus: Sequence[float], recipe: Recipe, name: str, shape: Shape, amount: Amount | None) -> str | None:
    """As above, for the least that a run can make of it: all blocks are recomputed where the recipe leaves that open,
    as much is sharded as it allows, and without a budget of the recipe's own packs are the smallest."""
    stage, cluster = recipe.stages[name], recipe.cluster
    ranks = max(1, cluster.ranks or len(gpus))
    memory, named = min(gpus[: cluster.ranks or None]), stage.batch.token_budget

    def needed(budget: int) -> float:
        tokens = (amount and amount.pack(budget, sequences_of(stage))) or budget
        return _least_on_gpu(recipe, stage, shape, tokens, ranks)

    most = needed(named or LEAST_BUDGET)
    if most <= memory:
        return None
    fix = "take a smaller model or shorter sequences" if recipe.model.lora else "take a smaller model, or `model.lora`"
    lower = [budget for budget in (*GPU_BUDGETS, *BUDGETS) if budget < (named or 0) and needed(budget) <= memory]
    if lower:
        fix = f"lower stages.{name}.batch.token_budget to {max(lower)}"
    needs = "needs at least" if named is None else "needs" if amount and amount.lengths else "needs up to"
    return f"stage {name} {needs} {most / GIB:.1f} GiB of a GPU and here it has {memory / GIB:.1f}; {fix}"


def _least_on_gpu(recipe: Recipe, stage: StageOptions, shape: Shape, tokens: int, ranks: int) -> float:
    """Bytes of an update of so many tokens at a time on one of these ranks."""
    model, cluster = recipe.model, recipe.cluster
    shards = ("none",) if ranks == 1 else SHARDS if cluster.shard == "auto" else (cluster.shard,)
    plans = [
        stage.plan_update(
            shape, model, precision_of(model), tokens, has_adapter=model.lora is not None,
            ranks=ranks, shard=shard, slots=-(-usual_slots(recipe, ranks) // ranks),
            recomputed=shape.layers if model.checkpointing is None else None,
        )
        for shard in shards
    ]  # fmt: skip
    return min(plan.total for plan in plans)


def precision_of(model: ModelOptions) -> Precision:
    """What a GPU computes in."""
    return model.precision or ("fp32" if model.path == "tiny" else "bf16")


def shape_of(model: ModelOptions) -> Shape | str:
    """The shape of a model, or why it is not known without fetching anything."""
    if model.path == "tiny":
        return Shape.of_tiny(model.tiny)
    file = None
    try:
        file = config_file(model)
        if file is None:
            return "unknown until the model is there"
        return Shape.of_config({**read_config(file), **model.override})
    except UserError as error:
        return f"unknown: {error.problem}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"unknown: {file} does not tell the shape of the model"


def head_size(model: ModelOptions) -> int | None:
    """The size of an attention head, where it can be known without fetching anything."""
    if model.path == "tiny":
        return model.tiny.hidden // model.tiny.heads
    try:
        file = config_file(model)
        values = {} if file is None else read_config(file)
        values = {**values.get("text_config", values), **model.override}
        return int(values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"])
    except (UserError, OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError):
        return None


def config_file(model: ModelOptions) -> Path | None:
    """The file of a model on this machine that tells its shape: its own, or what the hub's client has kept."""
    file = Path(model.path).expanduser() / "config.json"
    if file.is_file():
        return file
    return find_gguf(model.path) or kept_config(model)


def read_config(file: Path) -> dict[str, Any]:
    if file.name == "config.json":
        return dict(json.loads(file.read_text(encoding="utf-8")))
    from lemma.plugins.gguf.gguf_file import read_header

    return read_header(file).config()
