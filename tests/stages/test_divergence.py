"""A run that diverges stops with a sentence, keeps the last good checkpoint, and never calls spoilt weights final."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from lemma.core.errors import UserError
from lemma.core.events import silent
from lemma.learning.divergence import SKIPS_IN_A_ROW, Diverged, check_written
from lemma.learning.learner import Learner
from lemma.learning.learning_options import OptimOptions
from lemma.learning.loss_scaler import SCALE_START
from lemma.learning.optimiser import Optimiser, are_finite
from lemma.models.load_model import build_policy
from lemma.models.model_options import ModelOptions, TinyOptions
from lemma.objectives import NegativeLogLikelihood
from lemma.recipe import load_recipe
from lemma.runs.run import train
from tests.learning.test_learner import sequences
from tests.runs import test_rl_kill
from tests.stages import preference_world
from tests.stages.sft_world import World

OFTEN = {"validation": {}, "checkpoint": {"every": 1, "keep": 2}}
# An update that makes finite weights whose gradients are not, one whose log-probabilities are not either, and one that
# makes infinite weights.
RATES = (1e4, 1e15, 1e39)


@pytest.fixture(autouse=True)
def any_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates that a recipe may not have: nothing diverges as surely."""
    monkeypatch.setattr("lemma.learning.learning_options.LARGEST_RATE", float("inf"))


def stored(run: Path, stage: str) -> dict[str, dict[str, torch.Tensor]]:
    places = (run / "stages" / stage / "checkpoints").glob("step-*")
    return {place.name: load_file(place / "tensors.safetensors") for place in sorted(places)}


def check_stopped(run: Path, stage: str, error: UserError, rate: float) -> None:
    assert str(error).startswith(f"stage {stage} diverged: ")
    assert f"lower stages.{stage}.optim.lr (it is {rate:g})" in str(error)
    assert not (run / "stages" / stage / "final").exists() and not (run / "stages" / stage / "done.json").exists()
    for tensors in stored(run, stage).values():
        assert all(tensor.isfinite().all() for tensor in tensors.values())


@pytest.mark.parametrize("rate", RATES)
def test_supervised(world: World, rate: float) -> None:
    """The same command again ends in the same way, and the next stage never begins."""
    recipe = world.recipe(stages={"first": OFTEN | {"steps": 12, "optim": {"lr": rate}}, "second": OFTEN})
    for _ in range(2):
        with pytest.raises(UserError) as caught:
            world.train(recipe)
        check_stopped(world.run, "first", caught.value, rate)
    assert not (world.run / "stages" / "second").exists()


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_reinforcement(tmp_path: Path, name: str, rate: float) -> None:
    recipe = load_recipe(_changed(test_rl_kill.recipe(tmp_path, name, False, 8), {"optim": {"lr": rate}}))
    with pytest.raises(UserError) as caught:
        train(recipe, sink=silent)
    check_stopped(tmp_path / "run", "rl", caught.value, rate)


def test_a_critic_of_its_own_rate(tmp_path: Path) -> None:
    algorithm = test_rl_kill.SETTINGS["ppo"]["algorithm"] | {"value_lr": 1e39}
    recipe = load_recipe(_changed(test_rl_kill.recipe(tmp_path, "ppo", False), {"algorithm": algorithm}))
    with pytest.raises(UserError, match=r"weights of the critic .*stages\.rl\.algorithm\.value_lr"):
        train(recipe, sink=silent)


def _changed(path: Path, changes: dict[str, Any]) -> Path:
    content = yaml.safe_load(path.read_text())
    content["stages"]["rl"] |= changes
    path.write_text(yaml.safe_dump(content))
    return path


def test_preference(tmp_path: Path) -> None:
    world = preference_world.World(tmp_path)
    with pytest.raises(UserError) as caught:
        world.train("dpo", {"optim": {"lr": 1e39}})
    check_stopped(world.run, "prefer", caught.value, 1e39)


@pytest.mark.parametrize("rate", [1e12, 1e39])
def test_what_was_good_before_stays(world: World, monkeypatch: pytest.MonkeyPatch, rate: float) -> None:
    """The rate jumps after four good steps; the checkpoint of the fourth is that of a run that ends there."""
    monkeypatch.setattr("lemma.learning.learner.learning_rate", lambda optim, step, total: rate if step >= 4 else 1e-3)
    with pytest.raises(UserError, match=r"the last checkpoint before that is of step"):
        world.train(world.recipe(OFTEN | {"steps": 30}))
    good = stored(world.run, "sft")["step-00000004"]
    assert world.train(world.recipe(OFTEN | {"steps": 4}), fresh=True) == 0
    whole = stored(world.run, "sft")["step-00000004"]
    assert all(torch.equal(good[name], whole[name]) for name in whole)


def spoil(monkeypatch: pytest.MonkeyPatch, updates: set[int]) -> None:
    """Put a NaN into the gradient of these updates, counted from 1."""
    step, count = Optimiser.step, iter(range(1, 1000))

    def spoilt(self: Optimiser, rate: float) -> tuple[float, bool]:
        if next(count) in updates:
            next(iter(self.masters.values())).grad.fill_(torch.nan)  # type: ignore[union-attr]
        return step(self, rate)

    monkeypatch.setattr(Optimiser, "step", spoilt)


def test_a_few_bad_batches_are_passed_over(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that is due meanwhile waits for a good update."""
    spoil(monkeypatch, {3, 4})
    assert world.train(world.recipe({"steps": 6, "validation": {}, "checkpoint": {"every": 3, "keep": 2}})) == 0
    assert [row["updated"] for row in world.rows()] == [1, 1, 0, 0, 1, 1]
    assert list(stored(world.run, "sft")) == ["step-00000005", "step-00000006"]


def learner_of(precision: Any = "fp32") -> Learner:
    options = ModelOptions(tiny=TinyOptions(hidden=16, layers=1, feed_forward=32, context=32), precision=precision)
    policy = build_policy(options, torch.device("cpu"), 0)
    return Learner(policy, OptimOptions(lr=1e-3), token_budget=128, total_steps=50)


def test_only_skips_in_a_row_count_and_they_survive_a_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, {*range(1, SKIPS_IN_A_ROW), *range(SKIPS_IN_A_ROW + 1, 100)})
    learner, again = learner_of(), learner_of()
    for _ in range(SKIPS_IN_A_ROW + 2):
        learner.step(sequences(), NegativeLogLikelihood())
    assert learner.skipped == 2
    again.load(*learner.state())
    for _ in range(SKIPS_IN_A_ROW - 3):
        again.step(sequences(), NegativeLogLikelihood())
    with pytest.raises(Diverged, match=f"{SKIPS_IN_A_ROW} updates of the model in a row"):
        again.step(sequences(), NegativeLogLikelihood())


def test_fp16_may_look_for_its_scale_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 65536 down to 1 takes 16 skipped updates; only what overflows without any scale has diverged."""
    spoil(monkeypatch, set(range(1, 100)))
    learner = learner_of("fp16")
    halvings = int(SCALE_START).bit_length() - 1
    for _ in range(halvings - 1):
        learner.step(sequences(), NegativeLogLikelihood())
    assert learner.skipped == 0 and learner.optimiser.scaler.scale == 2.0
    with pytest.raises(Diverged):
        for _ in range(SKIPS_IN_A_ROW):
            learner.step(sequences(), NegativeLogLikelihood())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_finite_numbers(dtype: torch.dtype) -> None:
    good = [torch.randn(3, 5).to(dtype), torch.empty(0, dtype=dtype), torch.arange(3), torch.tensor(True)]
    assert are_finite(good) and are_finite([])
    for bad in (torch.nan, torch.inf, -torch.inf):
        for place in (0, 7, 14):
            tensor = torch.randn(15).to(dtype)
            tensor[place] = bad
            assert not are_finite([*good, tensor])


def test_a_model_that_overflows_where_it_is_written(tmp_path: Path) -> None:
    """As an adapter may when it is merged into fp16."""
    save_file({"fine": torch.ones(2)}, tmp_path / "one.safetensors")
    check_written(tmp_path)
    (tmp_path / "merged").mkdir()
    save_file({"large": torch.tensor([1e6]).half()}, tmp_path / "merged" / "model.safetensors")
    with pytest.raises(Diverged, match="large of its final model is not finite"):
        check_written(tmp_path)
