"""A run that is given more steps, epochs or stages goes on where it was, and says what that does to its schedule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lemma.core import faults
from lemma.core.errors import UserError
from tests.stages.sft_world import World

QUICK: dict[str, Any] = {"validation": {}, "checkpoint": {"every": 2}, "optim": {"lr": 2e-3, "warmup": 2}}


def steps(world: World, stage: str = "sft") -> list[int]:
    return [row["step"] for row in world.rows() if row["stage"] == stage]


def test_more_steps_give_what_a_longer_run_gives(tmp_path: Path) -> None:
    for name in ("long", "short"):
        (tmp_path / name).mkdir()
    straight, world = World(tmp_path / "long"), World(tmp_path / "short")
    assert straight.train(straight.recipe({**QUICK, "steps": 5})) == 0
    assert world.train(world.recipe({**QUICK, "steps": 3})) == 0
    assert world.train(world.recipe({**QUICK, "steps": 5})) == 0
    assert "sft: continues to 5 steps; it was to end after 3" in world.said()
    assert world.numbers() == straight.numbers() and world.weights() == straight.weights()
    assert world.train(world.recipe({**QUICK, "steps": 5})) == 0 and "sft: done already" in world.said()
    with pytest.raises(UserError, match=r"stages\.sft\.steps was 5, is 4: a stage cannot be made shorter; write 5"):
        world.train(world.recipe({**QUICK, "steps": 4}))


def test_more_epochs_and_new_last_stages(tmp_path: Path) -> None:
    world = World(tmp_path)
    one = {**QUICK, "steps": None, "data": {"arithmetic": {"count": 12, "operations": 2}}}
    assert world.train(world.recipe(stages={"a": one})) == 0
    two = {"a": {**one, "epochs": 2.0}, "b": {**QUICK, "steps": 1}}
    assert world.train(world.recipe(stages=two)) == 0
    assert steps(world, "a") == [1, 2, 3, 4] and steps(world, "b") == [1]
    with pytest.raises(
        UserError, match=r"stages\.a\.epochs was 2, is 3, but stage b continued from the model that a ended"
    ):
        world.train(world.recipe(stages={**two, "a": {**one, "epochs": 3.0}}))


def test_a_stage_that_has_not_begun_is_neither_continued_nor_made_shorter(tmp_path: Path) -> None:
    world = World(tmp_path)
    first = {**QUICK, "steps": 1}
    assert world.train(world.recipe(stages={"a": first, "b": {**QUICK, "steps": 4}}), only=["a"]) == 0
    assert world.train(world.recipe(stages={"a": first, "b": {**QUICK, "steps": 2}})) == 0
    assert steps(world, "b") == [1, 2] and not any("continues to" in text for text in world.said())


@pytest.mark.parametrize(
    ("optim", "sentence"),
    [
        ({"schedule": "cosine"}, "; its cosine schedule now ends there, so the learning rate jumps where it goes on"),
        ({"warmup": 0.5}, "; its warm-up is a share of all steps, and may begin again"),
    ],
)
def test_a_schedule_that_depends_on_the_length_asks_for_a_word(
    optim: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    world = World(tmp_path)
    change = {**QUICK, "optim": {"lr": 2e-3, **optim}}
    assert world.train(world.recipe({**change, "steps": 3})) == 0
    before = (world.run / "run.json").read_bytes()
    with pytest.raises(
        UserError, match=r"steps was 3, is 5, and its learning rate was planned for 3 steps; give --extend"
    ):
        world.train(world.recipe({**change, "steps": 5}))
    assert (world.run / "run.json").read_bytes() == before and world.final().exists()
    assert world.train(world.recipe({**change, "steps": 5}), extend=True) == 0
    assert f"sft: continues to 5 steps; it was to end after 3{sentence}" in world.said()
    assert steps(world) == [1, 2, 3, 4, 5]


def test_another_recipe_is_refused_as_before(tmp_path: Path) -> None:
    world = World(tmp_path)
    assert world.train(world.recipe({**QUICK, "steps": 2})) == 0
    for changes in ({"steps": 4, "optim": {"lr": 1.0}}, {"steps": None, "epochs": 9.0}):
        with pytest.raises(UserError, match="holds a run of another recipe"):
            world.train(world.recipe({**QUICK, **changes}), extend=True)
    with pytest.raises(UserError, match="holds a run of another recipe"):
        world.train(world.recipe(stages={"before": {**QUICK, "steps": 1}, "sft": {**QUICK, "steps": 2}}))


@pytest.mark.parametrize("point", ["folder.lengthening:1:EIO", "folder.lengthening:2:EIO"])
def test_dying_while_a_run_is_made_longer(point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path)
    assert world.train(world.recipe({**QUICK, "steps": 3})) == 0
    weights = world.weights()
    monkeypatch.setattr(faults, "_visits", type(faults._visits)())
    monkeypatch.setenv("LEMMA_FAULT", point)
    with pytest.raises(OSError):
        world.train(world.recipe({**QUICK, "steps": 5}))
    monkeypatch.delenv("LEMMA_FAULT")
    if point.startswith("folder.lengthening:1"):
        assert world.train(world.recipe({**QUICK, "steps": 3})) == 0 and world.weights() == weights
    assert world.train(world.recipe({**QUICK, "steps": 5})) == 0
    assert steps(world) == [1, 2, 3, 4, 5]
    assert world.train(world.recipe({**QUICK, "steps": 6})) == 0
    assert steps(world) == [1, 2, 3, 4, 5, 6]
    assert len(json.loads((world.run / "run.json").read_text())["earlier"]) == 2
