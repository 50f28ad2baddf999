"""Recipes have the settings that were published, and load without a network."""

from __future__ import annotations

import socket
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from lemma.cli import main
from lemma.core.types import Message, Problem
from lemma.formats import make_format
from lemma.recipe import Recipe, load_recipe
from lemma.rewards import RewardInput, combine
from lemma.stages.reinforcement.rl_options import ReinforcementOptions
from tests.recipes.published import AGENTS, MODELS, OTHERS, OWN, REWARDS, STAGES, WANDB

FOLDER = Path(__file__).resolve().parents[2] / "recipes"

# A completion that deserves every point, in each format; the answer is 4.
PERFECT = {
    "xml": "<reasoning>\n2 + 2\n</reasoning>\n<answer>\n4\n</answer>\n",
    "r1_zero": " 2 + 2 </think> <answer> 4 </answer>",
    "think_boxed": "2 + 2\n</think>\n\n\\boxed{4}",
    "working_out": "2 + 2<end_working_out><SOLUTION>4</SOLUTION>",
    "think_answer": "<think> 2 + 2 </think> <answer> 4 </answer>",
    "boxed": "2 + 2 is \\boxed{4}",
}


def recipe_of(name: str) -> Recipe:
    return load_recipe(FOLDER / f"{name}.yaml")


def differing(found: Any, wanted: dict[str, Any]) -> dict[str, Any]:
    """What is not as published: key -> value in the recipe."""

    def value(key: str) -> Any:
        return reduce(lambda inner, name: inner[name], key.split("."), found)

    return {key: value(key) for key, expected in wanted.items() if value(key) != expected}


@pytest.mark.parametrize("name", STAGES)
def test_settings_are_those_published(name: str) -> None:
    recipe = recipe_of(name)
    assert list(recipe.stages) == list(STAGES[name])
    values = recipe.model_dump()
    assert differing(values, MODELS[name]) == {}
    for stage, wanted in STAGES[name].items():
        assert differing(values["stages"][stage], wanted) == {}, stage


@pytest.mark.parametrize("name", AGENTS)
def test_so_are_those_of_agents(name: str) -> None:
    values = recipe_of(name).model_dump()
    (stage,) = values["stages"].values()
    assert differing(stage, AGENTS[name]) == {}
    twin = load_recipe(FOLDER / "small" / f"{name}.yaml").model_dump()
    (small,) = twin["stages"].values()
    assert small["rewards"] == stage["rewards"] and twin["model"]["lora"] == values["model"]["lora"]
    parts = ("agent", "reward", "pay_for_nothing", "difficulty")
    assert [small["environment"][part] for part in parts] == [stage["environment"][part] for part in parts]
    assert {**small["algorithm"], "mini_batches": 0} == {**stage["algorithm"], "mini_batches": 0}


@pytest.mark.parametrize("name", OTHERS)
def test_so_are_those_of_recipes_without_reinforcement(name: str) -> None:
    values = recipe_of(name).model_dump()
    assert list(values["stages"]) == list(OTHERS[name])
    for stage, wanted in OTHERS[name].items():
        assert differing(values["stages"][stage], wanted) == {}, stage


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_weights_and_biases_is_on_where_the_system_has_it_on(path: Path) -> None:
    assert (load_recipe(path).run.wandb is not None) == path.stem.startswith(WANDB)


@pytest.mark.parametrize("name", STAGES)
def test_a_perfect_completion_gets_the_published_points(name: str) -> None:
    recipe = recipe_of(name)
    stage = list(recipe.stages.values())[-1]
    assert isinstance(stage, ReinforcementOptions)
    text = PERFECT[recipe.format.name]
    problem = Problem((Message("user", "What is 2 + 2?"),), ("4",))
    scored = combine(stage.rewards, [RewardInput(text, problem, make_format(recipe.format).parse(text))])[0]
    points = {reward.name: reward.weight * (scored.parts[reward.name] or 0.0) for reward in stage.rewards}
    assert points == pytest.approx(REWARDS[name])
    assert list(points) == list(REWARDS[name])


@pytest.mark.parametrize("name", STAGES)
def test_planning_and_a_dry_run_need_no_network(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a plan reached for the network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    path = str(FOLDER / f"{name}.yaml")
    assert main(["plan", path]) == 1, "neither the model nor the data can be had"
    assert main(["train", path, "--dry-run", "--set", f"run.dir={tmp_path}/run"]) == 1
    assert f"stage {len(STAGES[name])}: {list(STAGES[name])[-1]} (rl)" in capsys.readouterr().out


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_recipe_that_ends_in_reinforcement_is_listed_here_and_has_a_twin(path: Path) -> None:
    recipe = load_recipe(path)
    if list(recipe.stages.values())[-1].kind == "rl" and path.stem not in OWN | AGENTS.keys():
        assert path.stem in STAGES
        assert (FOLDER / "small" / path.name).is_file()
