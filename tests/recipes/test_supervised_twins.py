"""Every published recipe of supervised learning alone has a small twin that learns the format it shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lemma.core.events import silent
from lemma.recipe import load_recipe
from lemma.runs.run import train
from lemma.stages.supervised_options import SupervisedOptions
from tests.recipes.published import OWN

FOLDER = Path(__file__).resolve().parents[2] / "recipes"
NAMES = ("luffy_sft", "math_sft", "openmath_sft")


def test_every_published_recipe_has_a_twin() -> None:
    large, small = ({path.stem for path in folder.glob("*.yaml")} for folder in (FOLDER, FOLDER / "small"))
    assert large - OWN == small


@pytest.mark.parametrize("name", NAMES)
def test_a_twin_differs_in_size_only(name: str) -> None:
    recipe, twin = (load_recipe(folder / f"{name}.yaml") for folder in (FOLDER, FOLDER / "small"))
    assert list(twin.stages) == list(recipe.stages) == ["sft"]
    large, small = recipe.stages["sft"], twin.stages["sft"]
    assert isinstance(large, SupervisedOptions) and isinstance(small, SupervisedOptions)
    assert small.optim == large.optim.model_copy(update={"lr": small.optim.lr})
    for option in ("normalise", "constant", "shuffle", "unique_examples"):
        assert getattr(small, option) == getattr(large, option)
    assert small.data.answers == large.data.answers
    assert twin.format.name == recipe.format.name
    assert (twin.model.lora, twin.model.checkpointing) == (recipe.model.lora, recipe.model.checkpointing)
    assert twin.model.override.keys() >= recipe.model.override.keys()
    assert twin.run.seed == recipe.run.seed


@pytest.mark.parametrize("name", NAMES)
def test_a_twin_trains(name: str, tmp_path: Path) -> None:
    twin = load_recipe(FOLDER / "small" / f"{name}.yaml", [f"run.dir={tmp_path}", "run.tensorboard=false"])
    assert train(twin, sink=silent) == 0
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["loss"] < 0.5 * rows[0]["loss"]
    assert list((tmp_path / "stages" / "sft" / "final").rglob("*model.safetensors"))
