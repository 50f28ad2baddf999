"""Every recipe of preference optimisation has a small twin: the same algorithm, trained here from end to end."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from lemma.core.events import silent
from lemma.recipe import Recipe, load_recipe
from lemma.rollouts import read_episodes
from lemma.runs.run import train
from lemma.stages.preference.examples import journal_pairs
from lemma.stages.preference.preference_options import PreferenceOptions

FOLDER = Path(__file__).resolve().parents[2] / "recipes"
NAMES = ("dpo", "kto", "cpo", "simpo", "orpo", "own_samples_dpo")
# The twins learn in 60 steps what their preference stage starts from; to see that a recipe runs, fewer are enough.
SHORT = ["stages.sft.steps=20", "stages.sft.log_every=20"]

EVERY = {"loss", "grad_norm", "lr", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"}


def preference(recipe: Recipe) -> tuple[str, PreferenceOptions]:
    name, stage = list(recipe.stages.items())[-1]
    assert isinstance(stage, PreferenceOptions)
    return name, stage


@pytest.mark.parametrize("name", NAMES)
def test_a_twin_differs_in_size_only(name: str) -> None:
    recipe, twin = (load_recipe(folder / f"{name}.yaml") for folder in (FOLDER, FOLDER / "small"))
    assert list(twin.stages) == ["sft", *recipe.stages]
    (stage, large), (other, small) = preference(recipe), preference(twin)
    assert stage == other
    assert (small.algorithm, small.reference, small.journal) == (large.algorithm, large.reference, large.journal)
    assert (small.optim.name, small.optim.schedule) == (large.optim.name, large.optim.schedule)
    assert (small.validation.share > 0) == (large.validation.share > 0)
    assert twin.model.lora == recipe.model.lora


def run(name: str, folder: Path, overrides: list[str]) -> list[dict[str, Any]]:
    """Train the twin; the rows of its metrics."""
    given = [f"run.dir={folder}", "run.tensorboard=false", *overrides]
    assert train(load_recipe(FOLDER / "small" / f"{name}.yaml", given), sink=silent) == 0
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def check(name: str, folder: Path, overrides: list[str]) -> PreferenceOptions:
    """Train it and look at every row of its last stage."""
    stage, options = preference(load_recipe(FOLDER / "small" / f"{name}.yaml", overrides))
    measured = [row for row in run(name, folder, overrides) if row["stage"] == stage]
    rows = [row for row in measured if row["axis"] == "train"]
    held_out = [row for row in measured if row["axis"] == "eval"]
    assert [row["step"] for row in rows] == list(range(1, (options.steps or 0) + 1))
    assert held_out[-1]["step"] == options.steps
    for row in rows:
        assert row.keys() >= EVERY | ({"kl"} if options.algorithm.needs_reference else set())
        assert row["grad_norm"] > 0
    assert all(math.isfinite(value) for row in measured for value in row.values() if isinstance(value, float))
    margins = [row["validation/rewards/margins"] for row in held_out]
    if name == "own_samples_dpo":  # its held-out pairs are few; over six seeds, those that are learnt end above 0.02
        margins = [row["rewards/margins"] for row in rows]
    assert margins[-1] > margins[0], "it comes to prefer what is right"
    assert (folder / "stages" / stage / "final" / "model.safetensors").is_file()
    return options


@pytest.mark.parametrize("name", [name for name in NAMES if name != "own_samples_dpo"])
def test_a_twin_trains(name: str, tmp_path: Path) -> None:
    stage = f"stages.{name}"
    much = [f"{stage}.steps=8", f"{stage}.validation.every=2"]
    if name == "orpo":
        # The preference is a tenth of the loss, and 16 held-out pairs are too few: with one of the fresh seeds 11 to 15
        # their margin did not rise. On 480 it rose by 70% or more with each of the fresh seeds 26 to 35.
        much = [f"{stage}.steps=30", f"{stage}.optim.lr=1e-2", f"{stage}.validation.every=5"]
        much += [f"{stage}.data.arithmetic.count=960", f"{stage}.validation.share=0.5"]
    check(name, tmp_path, [*SHORT, *much, f"{stage}.log_every=1"])


def test_a_model_learns_from_its_own_samples(tmp_path: Path) -> None:
    """The whole recipe: the samples of its second stage are the pairs of its third."""
    options = check("own_samples_dpo", tmp_path, [])
    journal = tmp_path / "stages" / "sample" / "journal"
    samples = [sample for path in sorted(journal.iterdir()) for sample in read_episodes(path)]
    assert len(samples) == 2 * 32 * 8
    assert {sample.verdict == "right" for sample in samples} == {True, False}
    pairs = journal_pairs(tmp_path, options.journal)
    learnt = json.loads((tmp_path / "stages" / "dpo" / "done.json").read_text())["examples"]
    assert 0.8 * len(pairs) < learnt < len(pairs), "all but the held-out tenth"
