"""A run that goes on finds what it left: its own checkpoints, its rows of metrics, its base weights, its rewards."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lemma.core import faults
from lemma.core.errors import UserError
from tests.algorithms import toy
from tests.stages.sft_world import World
from tests.stages.test_rl_reward_model import save_model

QUICK: dict[str, Any] = {"steps": 4, "validation": {}, "checkpoint": {"every": 2}}


@pytest.fixture
def die(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make the next run fail at a fault point with an error of the operating system, or go on undisturbed."""

    def at(point: str) -> None:
        monkeypatch.setattr(faults, "_visits", type(faults._visits)())
        monkeypatch.setenv("LEMMA_FAULT", point)

    return at


def stopped(world: World, die: Callable[[str], None], **model: Any) -> Path:
    """A run that died after its checkpoint of step 2, of four steps; the folder of its checkpoints."""
    die("stage.step_end:3:EIO")
    with pytest.raises(OSError):
        world.train(world.recipe(QUICK, **model))
    die("")
    return world.run / "stages" / "sft" / "checkpoints"


def test_a_checkpoint_of_another_run_is_passed_over(tmp_path: Path, die: Callable[[str], None]) -> None:
    """As when an older run's folder is copied over a newer one's."""
    for name in ("older", "newer"):
        (tmp_path / name).mkdir()
    older, newer = World(tmp_path / "older"), World(tmp_path / "newer")
    assert older.train(older.recipe({**QUICK, "optim": {"lr": 0.5}})) == 0
    steps = stopped(newer, die)
    shutil.rmtree(steps / "step-00000002")
    shutil.copytree(older.run / "stages/sft/checkpoints/step-00000002", steps / "step-00000002")
    assert newer.train(newer.recipe(QUICK)) == 0
    assert any("step 2 is broken (it is of a run of another recipe)" in text for text in newer.said())
    straight = World(tmp_path / "newer" / "straight")
    straight.folder.mkdir()
    assert straight.train(straight.recipe(QUICK)) == 0
    assert newer.weights() == straight.weights()


@pytest.mark.parametrize("damage", ["deleted", "cut", "blank", "torn"])
def test_lost_rows_of_metrics_are_noticed(damage: str, tmp_path: Path, die: Callable[[str], None]) -> None:
    world = World(tmp_path)
    stopped(world, die)
    path = world.run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    content = {
        "deleted": "",
        "cut": lines[0],
        "blank": "\n" + "".join(lines) + "\n\n",
        "torn": lines[0] + "{]\n" + lines[1],
    }
    path.unlink() if damage == "deleted" else path.write_text(content[damage])
    assert world.train(world.recipe(QUICK)) == 0
    lost = {"deleted": 2, "cut": 1, "blank": 0, "torn": 0}[damage]
    said = [text for text in world.said() if "metrics.jsonl lacks" in text]
    start = f"metrics.jsonl lacks {lost} of the 2 rows that stage sft wrote until step 2; its curves have a gap"
    assert [text.startswith(start) for text in said] == [True] * bool(lost)
    assert [row["step"] for row in world.rows()] == {0: [1, 2, 3, 4], 1: [1, 3, 4], 2: [3, 4]}[lost]


def make_base(folder: Path) -> Path:
    folder.mkdir()
    world = World(folder)
    assert world.train(world.recipe({**QUICK, "steps": 1})) == 0
    return Path(shutil.copytree(world.final(), folder / "base"))


def test_another_base_under_an_adapter_is_refused(tmp_path: Path, die: Callable[[str], None]) -> None:
    base = make_base(tmp_path / "made")
    world = World(tmp_path)
    lora = {"path": str(base), "lora": {"r": 2}}
    stopped(world, die, **lora)
    weights = load_file(base / "model.safetensors")
    save_file({name: tensor * 1.5 for name, tensor in weights.items()}, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="the base model is not what stage sft was trained with until step 2; restore"):
        world.train(world.recipe(QUICK, **lora))
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    assert world.train(world.recipe(QUICK, **lora)) == 0


def rl_stage(folder: Path, rewards: list[Any]) -> dict[str, Any]:
    changes = {
        "steps": 3,
        "rewards": rewards,
        "checkpoint": {"every": 1},
        "batch": {"problems": 2, "token_budget": 256},
    }
    return toy.reinforcement(folder, {"name": "grpo", "group_size": 2}, **changes)


def test_another_reward_between_two_starts_is_refused(tmp_path: Path, die: Callable[[str], None]) -> None:
    rule, model = tmp_path / "rule.py", save_model(tmp_path / "model")
    text = "def rule(item):\n    return float(sum(item.ids) % 2)\n"
    rule.write_text(text)
    stage = rl_stage(tmp_path, [f"{rule}:rule", {"name": "reward_model", "path": str(model)}])
    world = toy.Toy(tmp_path)
    die("rl.before_update:2:EIO")
    with pytest.raises(OSError):
        world.train(stage)
    die("")
    rule.write_text(text.replace("2", "3"))
    with pytest.raises(
        UserError, match=r"rule.* is not what stage toy was trained with until step 1; restore its files"
    ):
        world.train(stage)
    rule.write_text(text)
    weights = load_file(model / "model.safetensors")
    save_file({n: torch.zeros_like(t) for n, t in weights.items()}, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"what reward 2 \(reward_model\) is computed from is not what stage toy"):
        world.train(stage)
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    world.train(stage)
    assert [row["step"] for row in world.rows()] == [1, 2, 3]


def test_a_damaged_model_of_another_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    first, second = World(tmp_path / "first"), World(tmp_path)
    assert first.train(first.recipe({**QUICK, "steps": 1})) == 0
    weights = first.final() / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 4
    weights.write_bytes(bytes(data))
    for path in (first.run, first.final()):
        with pytest.raises(
            UserError, match=r"the model of stage sft in .* is damaged: model.safetensors is not what was"
        ):
            second.train(second.recipe(QUICK, path=str(path)))
    assert not second.run.exists()


def test_the_best_mark_reads_the_same_after_a_resume(tmp_path: Path, die: Callable[[str], None]) -> None:
    def best(world: World, point: str) -> bytes:
        world.folder.mkdir()
        recipe = world.recipe({**QUICK, "validation": {"share": 0.2, "every": 1}, "optim": {"lr": 1e-9}})
        if point:
            die(point)
            with pytest.raises(OSError):
                world.train(recipe)
            die("")
        assert world.train(recipe) == 0
        assert os.listdir(world.run / "stages/sft/checkpoints")
        return (world.run / "stages/sft/checkpoints/best.json").read_bytes()

    straight = best(World(tmp_path / "straight"), "")
    assert best(World(tmp_path / "resumed"), "stage.before_final_rename:1:EIO") == straight
    assert list(json.loads(straight)) == ["metric", "score", "step"]
