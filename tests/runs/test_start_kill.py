"""Kill a process while it starts, or starts anew with --fresh: the next start finds the earlier run whole or the new
one, never a mixture, and is never refused for what a dead process left behind."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lemma.core import faults
from lemma.core.errors import UserError
from lemma.core.random import stream
from lemma.recipe import Recipe
from tests.preloaded import Python
from tests.stages.sft_world import World

QUICK: dict[str, Any] = {"steps": 1, "validation": {}}
EARLIER: dict[str, Any] = {"first": QUICK, "second": QUICK}
NEW = {name: stage | {"optim": {"lr": 1e-3}} for name, stage in EARLIER.items()}


def killed(world: World, recipe: Recipe, *options: str, fault: str = "", after: float | None = None) -> bool:
    """Whether the command died: at a fault point, or by a kill after so many seconds."""
    del recipe  # it is the one that lies in the world's folder
    words = ["-m", "lemma", "train", world.folder / "recipe.yaml", *options]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = Python(words, env=os.environ | {"LEMMA_FAULT": fault}, **quiet)
    if after is not None:
        time.sleep(after)
        process.kill()
    return process.wait(100) == -signal.SIGKILL


def outcome(world: World) -> tuple[bytes, bytes, list[dict[str, Any]]]:
    return world.weights("first"), world.weights("second"), world.numbers()


@dataclass(frozen=True)
class Ends:
    """What the two recipes end with where nobody dies."""

    folder: Path
    earlier: Any
    new: Any

    def begin(self, world: World) -> None:
        """Put the finished run of the earlier recipe into this world."""
        shutil.copytree(self.folder, world.run)


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    worlds = {}
    for name, stages in (("earlier", EARLIER), ("new", NEW)):
        worlds[name] = World(tmp_path_factory.mktemp(name))
        assert worlds[name].train(worlds[name].recipe(stages=stages)) == 0
    return Ends(worlds["earlier"].run, outcome(worlds["earlier"]), outcome(worlds["new"]))


def check(world: World, ends: Ends) -> None:
    """The new recipe, without --fresh, finds the earlier run, whole, or ends as the new one."""
    try:
        assert world.train(world.recipe(stages=NEW)) == 0
        assert outcome(world) == ends.new
    except UserError as error:
        assert "holds a run of another recipe (stages.first.optim.lr was 0.002, is 0.001)" in str(error)
        assert outcome(world) == ends.earlier
        assert world.train(world.recipe(stages=EARLIER)) == 0
        assert "first: done already" in world.said() and "second: done already" in world.said()
    assert not [*world.run.glob(".earlier"), *world.run.glob(".doomed-*")]


@pytest.mark.parametrize(
    "deaths",
    [
        ["folder.set_aside:3"],
        ["folder.before_identity:1"],
        ["folder.before_recipe:1"],
        ["folder.doomed:1"],
        ["folder.deleting:2"],
        ["folder.deleting:1"],
        ["jsonl.mid_line:1"],
        ["folder.before_recipe:1", "folder.put_back:1", "folder.put_back:2"],
        ["folder.before_recipe:1", "folder.deleting:1", "folder.doomed:2"],
    ],
    ids=" then ".join,
)
def test_death_in_a_fresh_start(world: World, ends: Ends, deaths: list[str]) -> None:
    ends.begin(world)
    for fault in deaths:
        assert killed(world, world.recipe(stages=NEW), "--fresh", fault=fault), fault
    check(world, ends)


@pytest.mark.parametrize("fault", ["folder.set_aside:1", "folder.doomed:1", "folder.deleting:2"])
def test_death_in_a_fresh_start_of_one_stage(world: World, ends: Ends, fault: str) -> None:
    """The other stage and every row stay."""
    recipe = world.recipe(stages=EARLIER)
    ends.begin(world)
    assert killed(world, recipe, "--fresh", "--only", "second", fault=fault)
    assert world.train(recipe) == 0
    assert outcome(world) == ends.earlier


@pytest.mark.parametrize("fault", ["folder.before_identity:1", "folder.before_recipe:1", "jsonl.mid_line:1"])
def test_death_in_a_first_start(world: World, ends: Ends, fault: str) -> None:
    """The same command goes on, and another recipe is welcome as long as nothing was learnt."""
    assert killed(world, world.recipe(stages=EARLIER), fault=fault)
    assert world.train(world.recipe(stages=NEW)) == 0
    assert outcome(world) == ends.new


@pytest.mark.parametrize("place", ["folder.before_identity", "folder.before_recipe"])
@pytest.mark.parametrize("fresh", [False, True])
def test_a_full_disk_in_a_start(
    world: World, ends: Ends, monkeypatch: pytest.MonkeyPatch, place: str, fresh: bool
) -> None:
    if fresh:
        ends.begin(world)
    monkeypatch.setattr(faults, "_visits", type(faults._visits)())
    monkeypatch.setenv("LEMMA_FAULT", f"{place}:1:ENOSPC")
    with pytest.raises(OSError, match="No space left") as caught:
        world.train(world.recipe(stages=NEW), fresh=fresh)
    assert caught.value.errno == errno.ENOSPC
    monkeypatch.delenv("LEMMA_FAULT")
    if fresh:
        check(world, ends)
    else:
        assert world.train(world.recipe(stages=NEW)) == 0
        assert outcome(world) == ends.new


def test_stages_set_aside_by_a_dead_process_still_count(world: World, ends: Ends) -> None:
    """A fresh start of the first alone is refused, although the second lay in .earlier when the command came."""
    recipe = world.recipe(stages=EARLIER)
    ends.begin(world)
    assert killed(world, recipe, "--fresh", fault="folder.before_identity:1")
    assert not world.final("second").exists()
    with pytest.raises(UserError, match="second continued from first, which --fresh would start over"):
        world.train(recipe, only=["first"], fresh=True)
    assert outcome(world) == ends.earlier


@pytest.mark.kill
@pytest.mark.parametrize("seed", range(30))
def test_random_death_in_a_fresh_start(world: World, ends: Ends, seed: int) -> None:
    ends.begin(world)
    chance = stream(seed, "start kills")
    for _ in range(3):
        killed(world, world.recipe(stages=NEW), "--fresh", after=float(chance.random()) * 0.6)
    check(world, ends)
