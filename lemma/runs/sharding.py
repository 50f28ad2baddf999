"""What is split over the ranks where the recipe leaves that open: as little as fits, by the memory plan."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from lemma.cluster.cluster_options import ClusterOptions
from lemma.core.ranks import world_size
from lemma.learning.optimiser import Split
from lemma.models.load_model import pick_precision
from lemma.models.memory import Shape, plan_training
from lemma.models.model_options import ModelOptions, Precision
from lemma.models.places import TINY, resolve

# Share of a GPU's memory that an update may fill, and the smallest packs that are worth computing.
MEMORY_SHARE, FEWEST_TOKENS = 0.85, 2048


def what_to_split(
    cluster: ClusterOptions, model: ModelOptions, device: torch.device, start: Path | None, *, can_split: bool = False
) -> Split:
    """What the learners of a stage deal out, of a model that starts from the folder `start` or as the recipe says.
    `can_split`: the weights too, where the recipe leaves that open."""
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
    return least_split(shape, model, pick_precision(model.precision, device), memory, world_size(), can_split)


def least_split(
    shape: Shape, model: ModelOptions, precision: Precision, memory: float, ranks: int, can_split: bool = False
) -> Split:
    """The optimiser's state, which costs nothing to split; gradients too where that does not fit; then the weights,
    where that is possible."""

    def fits(shard: Split) -> bool:
        plan = plan_training(shape, model, precision, FEWEST_TOKENS, ranks=ranks, shard=shard, recomputed=shape.layers)
        return plan.total <= MEMORY_SHARE * memory

    if fits("optimiser"):
        return "optimiser"
    return "weights" if can_split and not fits("gradients") else "gradients"


def _shape(model: ModelOptions, start: Path | None) -> Shape | None:
    if start is None and model.path == TINY:
        return Shape.of_tiny(model.tiny)
    try:
        place = start or Path(resolve(model.path))
        return Shape.of_config(json.loads((place / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError):
        return None
