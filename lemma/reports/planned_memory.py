"""The memory that a stage was planned to take, to show next to what it took."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lemma.learning.learning_options import USUAL_BUDGET
from lemma.models.memory import GIB, Shape, plan_training
from lemma.models.model_options import ModelOptions
from lemma.models.places import TINY


def planned_gib(run: Path, recipe: Mapping[str, Any], stage: str) -> float | None:
    """The peak of an update by the plan, without the engine's cache; None where the model's shape is not known."""
    try:
        model = ModelOptions(**recipe["model"])
        options = recipe["stages"][stage]
        shape = Shape.of_tiny(model.tiny) if model.path == TINY else _shape(run, stage, model.path)
        precision = model.precision or ("fp32" if recipe["run"]["device"] == "cpu" else "bf16")
        eight_bit = options["optim"]["name"] == "adamw_8bit"
        budget = int(options["batch"]["token_budget"] or USUAL_BUDGET)
        on_cpu = recipe["run"]["device"] == "cpu"
        plan = plan_training(shape, model, precision, budget, eight_bit_moments=eight_bit, on_cpu=on_cpu)
        return plan.total / GIB
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ValidationError):
        return None


def _shape(run: Path, stage: str, path: str) -> Shape:
    final = run / "stages" / stage / "final"
    for folder in (final / "merged", final, Path(path).expanduser()):
        if (folder / "config.json").is_file():
            return Shape.of_config(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    raise KeyError(path)
