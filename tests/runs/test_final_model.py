"""A stage's final model has a manifest in done.json, and whoever starts from the model looks at it first."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lemma.core.errors import UserError
from lemma.learning import learner
from lemma.runs.exporting import export_model
from tests.stages.sft_world import World

QUICK: dict[str, Any] = {"steps": 1, "validation": {}}
TWO = {"first": QUICK, "second": QUICK}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = World(tmp_path_factory.mktemp("whole"))
    assert world.train(world.recipe(stages=TWO)) == 0
    return world


def flip_a_bit(final: Path) -> None:
    path = final / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(bytes(data))


def other_weights(final: Path) -> None:
    path = final / "model.safetensors"
    save_file({name: torch.zeros_like(t) for name, t in load_file(path).items()}, path, metadata={"format": "pt"})


def change_done(final: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = final.with_name("done.json")
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit flipped": (flip_a_bit, "model.safetensors is not what was written"),
    "other weights": (other_weights, "model.safetensors is not what was written"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json is missing"),
    "another configuration": (lambda f: (f / "config.json").write_text("{}"), "config.json is not what was written"),
    "no files": (lambda f: change_done(f, lambda d: d["files"].clear()), "done.json names no files"),
    "no manifest": (lambda f: change_done(f, lambda d: d.pop("files")), "done.json does not say what was written"),
    "no JSON": (lambda f: f.with_name("done.json").write_text("{"), "done.json does not say what was written"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_is_found_and_repaired_as_the_sentence_says(world: World, whole: World, how: str) -> None:
    shutil.copytree(whole.run, world.run)
    shutil.rmtree(world.run / "stages" / "second")
    recipe = world.recipe(stages=TWO)
    act, why = DAMAGE[how]
    act(world.final("first"))
    with pytest.raises(UserError) as caught:
        world.train(recipe)
    done = world.run / "stages" / "first" / "done.json"
    assert str(caught.value) == (
        f"the model of stage first in {world.final('first')} is damaged: {why}; "
        f"remove {done} and train again: the stage writes its model again from its last checkpoint"
    )
    assert not (world.run / "stages" / "second").exists()
    done.unlink()
    assert world.train(recipe) == 0
    assert (world.weights("first"), world.weights("second")) == (whole.weights("first"), whole.weights("second"))
    assert world.numbers() == whole.numbers()


def test_what_else_lies_in_the_folder_is_no_damage(world: World, whole: World) -> None:
    shutil.copytree(whole.run, world.run)
    shutil.rmtree(world.run / "stages" / "second")
    (world.final("first") / "README.md").write_text("mine")
    assert world.train(world.recipe(stages=TWO)) == 0


def test_a_later_stage_has_dropout_of_its_own(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: dict[str, set[int]] = {"first": set(), "second": set()}
    for name, own in seeds.items():
        with monkeypatch.context() as patch:
            patch.setattr(learner.torch, "manual_seed", own.add)
            assert world.train(world.recipe(stages=TWO, lora={"r": 2, "dropout": 0.1}), only=[name]) == 0
    assert all(seeds.values()) and not seeds["first"] & seeds["second"]


def test_with_adapters_the_merged_model_counts(world: World) -> None:
    recipe = world.recipe(stages=TWO, lora={"r": 2})
    assert world.train(recipe, only=["first"]) == 0
    (world.final("first") / "adapter" / "adapter_model.safetensors").unlink()
    assert world.train(recipe) == 0
    flip_a_bit(world.final("first") / "merged")
    assert world.train(recipe) == 0, "nothing starts from it any more"
    with pytest.raises(UserError, match=r"merged is damaged: model\.safetensors is not what was written"):
        export_model(recipe, world.run, stage="second", checkpoint="last", kind="merged", to=None)
