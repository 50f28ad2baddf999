"""What to shard across the ranks if the recipe leaves it open: as little as fits, according to the memory plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lemma.cluster.cluster_options import ClusterOptions
from lemma.core.files import from_json
from lemma.core.ranks import slots_of_one, world_size
from lemma.learning.optimiser import Split
from lemma.models.load_model import pick_precision
from lemma.models.memory import Shape, plan_training
from lemma.models.model_options import ModelOptions, Precision
from lemma.models.places import TINY, resolve

# Share of a GPU's memory that an update may fill, and the smallest pack size worth computing.
MEMORY_SHARE, FEWEST_TOKENS = 0.85, 2048


def what_to_split(
    cluster: ClusterOptions, model: ModelOptions, device: torch.device, start: Path | None, *, can_split: bool = False
) -> Split:
    """What the learners of a stage shard, for a model loaded from the folder `start` or as the recipe says.
    `can_split`: whether the weights may be sharded too, if the recipe leaves it open."""
    if cluster.shard == "weights":
        return "weights" if world_size() > 1 else "none"
    if cluster.shard != "auto":
        return cluster.shard
    if world_size() == 1 or device.type != "cuda":
        return "none"
    shape = _shape(model, start)
    if shape is None:
        return "optimiser"
    memory = torch.cuda.get_device_properties(device).total_memory
    precision = pick_precision(model.precision, device)
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


def _shape(model: ModelOptions, start: Path | None) -> Shape | None:
    if start is None and model.path == TINY:
        return Shape.of_tiny(model.tiny)
    try:
        place = start or Path(resolve(model.path))
        return Shape.of_config(from_json((place / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError):
        return None
