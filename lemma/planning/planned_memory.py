"""The memory that a stage was planned to take on one of its ranks, to show next to what it took."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lemma.cluster.cluster_options import ClusterOptions
from lemma.core.errors import UserError
from lemma.core.files import from_json
from lemma.core.hub_access import looks_like_path
from lemma.learning.learning_options import MOMENTS, USUAL_BUDGET
from lemma.models.memory import GIB, Shape, plan_training
from lemma.models.model_options import ModelOptions
from lemma.models.places import TINY, base_of_adapter, resolve
from lemma.runs.ingredients import cached_folder
from lemma.runs.run_folder import LAYOUT

RECORDED = ("ranks", "shard", "token_budget", "recomputed")


def planned_gib(run: Path, recipe: Mapping[str, Any], stage: str) -> float | None:
    """The peak of an update by the plan, without the engine's cache; None where the model's shape is not known."""
    try:
        model = ModelOptions(**recipe["model"])
        options = recipe["stages"][stage]
        shape = Shape.of_tiny(model.tiny) if model.path == TINY else _shape(run, stage, model.path)
        precision = model.precision or ("fp32" if recipe["run"]["device"] == "cpu" else "bf16")
        moments = MOMENTS[options["optim"]["name"]]
        on_cpu = recipe["run"]["device"] == "cpu"
        layout = _layout(run, recipe, stage)
        budget = layout.pop("token_budget") or options["batch"]["token_budget"] or USUAL_BUDGET
        plan = plan_training(shape, model, precision, budget, moments=moments, on_cpu=on_cpu, **layout)
        return plan.total / GIB
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ValidationError, UserError):
        return None


def _layout(run: Path, recipe: Mapping[str, Any], stage: str) -> dict[str, Any]:
    """Ranks, the slots of one, what they split, tokens at a time and recomputed blocks, as the stage recorded them at
    its start; before that, as far as the recipe tells."""
    path = run / "stages" / stage / LAYOUT
    if path.is_file():
        found = from_json(path.read_text(encoding="utf-8"))
        layout = {name: str(found[name]) if name == "shard" else int(found[name]) for name in RECORDED}
        return layout | {"slots": -(-int(found.get("slots", 1)) // int(found["ranks"]))}
    cluster = ClusterOptions(**(recipe.get("cluster") or {}))
    shard = cluster.shard
    if shard == "auto":
        shard = "none" if recipe["run"]["device"] == "cpu" else "optimiser"
    ranks = cluster.learners
    return {"ranks": ranks, "slots": cluster.slots_of_one(ranks), "shard": shard, "token_budget": None}


def _shape(run: Path, stage: str, path: str) -> Shape:
    final = run / "stages" / stage / "final"
    place = resolve(path)
    base = base_of_adapter(place) or place
    cached = None if looks_like_path(base) else cached_folder(base)
    for folder in filter(None, (final / "merged", final, Path(base).expanduser(), cached)):
        if (folder / "config.json").is_file():
            return Shape.of_config(from_json((folder / "config.json").read_text(encoding="utf-8")))
    raise KeyError(path)
