"""A tiny model learns to play: it comes to use what it is told between its turns, and without that it cannot.

Nobody shows it how to win: what it imitates first are random guesses, and the reward is success alone.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from lemma.core.events import silent
from lemma.recipe import Recipe, load_recipe
from lemma.runs.run import train
from tests.stages.game_world import measured

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "higher_lower.yaml"
FIVE_MINUTES = 300.0


def played(folder: Path, *changes: str) -> list[dict[str, Any]]:
    """The rows of the reinforcement stage of the recipe, with these changes."""
    recipe: Recipe = load_recipe(RECIPE, [f"run.dir={folder / 'run'}", *changes])
    assert train(recipe, sink=silent) == 0
    return measured(folder / "run", "rl")


def share_right(rows: list[dict[str, Any]], last: int) -> float:
    return sum(row["right"] for row in rows[-last:]) / last


SMALL = [
    *(f"stages.{stage}.data.guessing.{name}" for stage in ("sft", "rl") for name in ("numbers=7", "turns=3")),
    "stages.rl.environment.turns=3", "stages.rl.data.guessing.count=7", "stages.rl.batch.problems=7",
    "stages.sft.steps=150", "stages.rl.steps=60",
]  # fmt: skip


def test_a_few_steps_make_it_better(tmp_path: Path) -> None:
    """Seven numbers in three guesses. Of three seeds, one gained 0.13 and two 0.24."""
    rows = played(tmp_path, *SMALL)
    assert abs(rows[0]["right"] - (1 - (6 / 7) ** 3)) < 0.2, "112 games of random guesses"
    assert share_right(rows, 5) > share_right(rows[:5], 5) + 0.06, "560 games each"
    last = rows[-1]
    assert last["turns/max"] == 3.0 and 1.0 < last["turns/mean"] < 3.0
    # On some kinds of CPU the rate, which is high, spoils turns again in the end.
    assert min(row["truncated"] for row in rows) < 0.05 and last["mismatch/max"] < 1e-4
    assert last["turns/replies_cut"] == 0.0 and last["rewards/environment/mean"] == last["right"]


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_sixteen_numbers_in_five_guesses_within_five_minutes(seed: int, tmp_path: Path) -> None:
    begin = time.process_time()
    rows = played(tmp_path, f"run.seed={seed}")
    seconds = time.process_time() - begin
    print(
        f"seed {seed}: {rows[0]['right']:.3f} at first, {share_right(rows, 10):.3f} in the end, {seconds:.0f} s of CPU"
    )
    assert rows[0]["right"] < 5 / 16 + 0.1
    assert share_right(rows, 10) >= 0.9
    assert seconds < FIVE_MINUTES


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_without_replies_the_same_training_stays_at_chance(seed: int, tmp_path: Path) -> None:
    mute = ["stages.sft.data.guessing.mute=true", "stages.rl.environment.mute=true"]
    rows = played(tmp_path, f"run.seed={seed}", *mute)
    print(f"seed {seed}, mute: {share_right(rows, 10):.3f} in the end")
    assert share_right(rows, 10) < 5 / 16 + 0.05, "2,560 games"
