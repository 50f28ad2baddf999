"""The memory that the report expects of a rank, by the recipe and by what the stage recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lemma.config.load import load_values
from lemma.learning.learning_options import USUAL_BUDGET
from lemma.models.memory import GIB, Shape, plan_training
from lemma.models.model_options import ModelOptions
from lemma.recipe import Recipe
from lemma.reports.page_data import planned_gib


def recipe_of(device: str = "cpu", **cluster: Any) -> dict[str, Any]:
    values = {"run": {"device": device}, "cluster": cluster, "stages": {"sft": {"steps": 1}, "grpo": {"steps": 1}}}
    return load_values(Recipe, values, []).model_dump(mode="json")


def planned(budget: int = USUAL_BUDGET, device: str = "cpu", **layout: Any) -> float:
    model = ModelOptions()
    precision = "fp32" if device == "cpu" else "bf16"
    shape = Shape.of_tiny(model.tiny)
    return plan_training(shape, model, precision, budget, on_cpu=device == "cpu", **layout).total / GIB


def test_by_the_recipe_before_a_stage_has_started(tmp_path: Path) -> None:
    assert planned_gib(tmp_path, recipe_of(), "sft") == planned()
    found = planned_gib(tmp_path, recipe_of(ranks=4, shard="gradients"), "sft")
    assert found == planned(ranks=4, shard="gradients") != planned()
    served = recipe_of()
    served["stages"]["grpo"]["rollout"]["engine"]["servers"] = 3
    assert planned_gib(tmp_path, served, "sft") == planned(slots=3)
    assert planned_gib(tmp_path, recipe_of(slots=4), "sft") == planned(slots=4)
    on_gpus = recipe_of("auto", ranks=4)
    assert planned_gib(tmp_path, on_gpus, "sft") == planned(device="auto", ranks=4, shard="optimiser")


def test_by_what_the_stage_recorded(tmp_path: Path) -> None:
    folder = tmp_path / "stages/sft"
    folder.mkdir(parents=True)
    layout = {"ranks": 2, "shard": "optimiser", "recomputed": 1}
    (folder / "layout.json").write_text(json.dumps({**layout, "token_budget": 512}))
    assert planned_gib(tmp_path, recipe_of(), "sft") == planned(512, **layout)
    (folder / "layout.json").write_text(json.dumps({**layout, "token_budget": 512, "slots": 6}))
    assert planned_gib(tmp_path, recipe_of(), "sft") == planned(512, **layout, slots=3), "of one rank"
    for broken in ("{}", "not JSON", '{"ranks": null}'):
        (folder / "layout.json").write_text(broken)
        assert planned_gib(tmp_path, recipe_of(), "sft") is None


def test_of_an_adapter_it_is_that_of_the_model_below(tmp_path: Path) -> None:
    """Where only the adapter was saved: of a folder, of another run's adapter, and of a hub name in the cache."""
    config = {"model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 128}
    config |= {"num_attention_heads": 4, "intermediate_size": 96}
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    adapter = tmp_path / "other" / "stages" / "sft" / "final" / "adapter"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tmp_path / "base")}))
    (tmp_path / "other" / "recipe.yaml").write_text("stages: {sft: {}}")
    recipe = recipe_of()
    found = []
    for path in (tmp_path / "base", tmp_path / "other", tmp_path / "nowhere"):
        recipe["model"]["path"] = str(path)
        found.append(planned_gib(tmp_path / "run", recipe, "sft"))
    assert found[0] is not None and found == [found[0], found[0], None]


@pytest.mark.parametrize("name", ["ranks", "slots", "shard", "recomputed"])
def test_each_of_them_counts(name: str) -> None:
    layout = {"ranks": 2, "slots": 1, "shard": "optimiser", "recomputed": 0}
    other = {"ranks": 4, "slots": 2, "shard": "gradients", "recomputed": 2}
    assert planned(**layout) != planned(**layout | {name: other[name]})
