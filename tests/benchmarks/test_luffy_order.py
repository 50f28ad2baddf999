"""The recipes and the table of benchmarks/luffy_order.py; the runs themselves take minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import luffy_order
from lemma.data.load_rows import load_rows
from lemma.formats import make_format
from lemma.formats.encode import encode_demonstration
from lemma.models.tiny import tiny_tokenizer
from lemma.recipe import Recipe

SETTINGS = luffy_order.Settings(rl_steps=2, problems=4)


def recipe_of(system: str, seed: int = 1) -> Recipe:
    return Recipe.model_validate(luffy_order.recipe_of(SETTINGS, system, seed, Path("runs/luffy_order")))


def test_the_systems_of_a_seed_share_their_start_and_differ_as_they_should() -> None:
    recipes = {system: recipe_of(system) for system in luffy_order.SYSTEMS}
    assert len({recipe.model.path for recipe in recipes.values()}) == 1
    assert recipe_of("luffy", 2).model.path != recipes["luffy"].model.path
    algorithms = {system: recipe.stages["rl"].algorithm for system, recipe in recipes.items()}
    assert {system: one.prefix.samples for system, one in algorithms.items()} == {
        "luffy": 1, "on_policy": 0, "rl_sft_loss": 1, "sft_rl": 0
    }  # fmt: skip
    assert algorithms["rl_sft_loss"].sft_weight == 1.0 and algorithms["luffy"].sft_weight is None
    assert list(recipes["sft_rl"].stages) == ["traces", "rl"]
    assert algorithms["sft_rl"] == algorithms["on_policy"]


def test_a_trace_fits_into_a_response() -> None:
    fmt = make_format(luffy_order.FORMAT)
    stage = recipe_of("luffy").stages["rl"]
    encoded = [encode_demonstration(fmt, item, tiny_tokenizer()) for item in load_rows(stage.data, 0)]
    longest = max(int(one.loss_mask_T.sum()) for one in encoded)
    assert longest == 6 * SETTINGS.operations + 4 < stage.rollout.max_tokens


def measured(right: str) -> dict[str, Any]:
    share = sum(map(int, right)) / len(right)
    return {"accuracy": share, "format": 1.0, "written": 0.5, "right": right}


def row(system: str, seed: int, greedy: str, sampled: str) -> dict[str, Any]:
    found = measured(sampled)
    found["accuracy"] /= luffy_order.SAMPLES
    return {"system": system, "seed": seed, "greedy": measured(greedy), "sampled": found}


def test_the_table_ranks_by_greedy_accuracy_and_leaves_failed_rows_out() -> None:
    rows = [
        row("start", 1, "0000", "0100"),
        row("on_policy", 1, "0001", "0002"),
        row("luffy", 1, "1111", "2222"),
        row("luffy", 2, "1101", "2220"),
        {"system": "sft_rl", "seed": 1, "error": "longer than 1 s"},
    ]
    lines = luffy_order.table(rows).splitlines()[2:]
    assert [line.split(" | ")[0].strip("| ") for line in lines] == ["luffy", "on_policy", "start"]
    cells = lines[0].split(" | ")
    assert cells[3] == "87.5%" and cells[6] == "87.5%"
    # Half the difference of the two seeds is their standard error, and one degree of freedom makes it 12.7 times that.
    assert cells[5] == "[0.0%, 100.0%]"


def test_a_row_with_an_unknown_value_is_refused() -> None:
    with pytest.raises(SystemExit, match="rl_stps"):
        luffy_order.settings_of({"system": "luffy", "seed": 1, "rl_stps": 3})
