"""LUFFY with a teacher's own probabilities: from a file in LUFFY's columns to the loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lemma.core import faults
from lemma.core.errors import UserError
from lemma.data.prepared import write_rows
from lemma.data.readers import LUFFY_PROBS
from tests.algorithms import toy

TINY = {"hidden": 16, "layers": 1, "feed_forward": 16, "heads": 2, "kv_heads": 1, "context": 32}
GIVEN = {"name": "luffy", "group_size": 3, "off_policy": {"behaviour": "given"}}
ONE = {"name": "luffy", "group_size": 3}


def rows(probs: list[float] | None, column: str = LUFFY_PROBS) -> list[dict[str, Any]]:
    """The toy's questions, each with a trace of two words."""
    return [
        {
            "data_source": "toy",
            "prompt": [{"role": "user", "content": question}],
            "target": [{"role": "assistant", "content": f"{gold} {gold}"}],
            "ability": "math",
            "reward_model": {"ground_truth": gold, "style": "rule"},
            "extra_info": {"index": number, "split": "train"},
            column: probs,
        }
        for number, (question, gold) in enumerate(toy.QUESTIONS.items())
    ]


def run(folder: Path, content: list[dict[str, Any]], algorithm: dict[str, Any], file: str = "a.parquet") -> toy.Toy:
    folder.mkdir(exist_ok=True)
    write_rows(folder / file, content)
    stage = {"rewards": [toy.PARITY], "steps": 2, "rollout": {"max_tokens": 6}, "checkpoint": {"every": 1}}
    stage["batch"] = {"problems": 4, "token_budget": 256}
    world = toy.Toy(folder)
    world.train(toy.reinforcement(folder, algorithm, data={"source": str(folder / file)}, **stage), tiny=TINY)
    return world


@pytest.mark.parametrize("column", [LUFFY_PROBS, "trace_probs"])
def test_the_weight_of_a_teachers_token_is_its_probability_over_the_teachers(column: str, tmp_path: Path) -> None:
    for row in run(tmp_path, rows([0.25, 0.25, 0.25], column), GIVEN).rows():
        assert row["off/share"] > 0
        assert row["off/ratio"] == pytest.approx(row["off/prob"] / (0.25 + 1e-6), rel=1e-4)


def test_the_end_of_a_trace_may_lack_its_probability_and_counts_as_certain(tmp_path: Path) -> None:
    """The words of an untrained model are about equally likely: of three tokens, two have four times the weight."""
    first = run(tmp_path, rows([0.25, 0.25]), GIVEN).rows()[0]
    assert first["off/ratio"] == pytest.approx(first["off/prob"] * (4 + 4 + 1) / 3, rel=0.05)


def test_given_probabilities_make_another_model_than_a_behaviour_of_one(tmp_path: Path) -> None:
    worlds = [run(tmp_path / "a", rows([0.25] * 3), GIVEN), run(tmp_path / "b", rows([0.25] * 3), ONE)]
    given, one = (world.rows()[0] for world in worlds)
    assert given["off/prob"] == one["off/prob"], "the same traces and the same model"
    assert given["off/ratio"] != pytest.approx(one["off/ratio"], rel=0.01)
    first, second = (load_file(world.final / "model.safetensors") for world in worlds)
    assert any(not torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("probs", [[0.5], [0.5] * 4, None], ids=["few", "many", "none"])
@pytest.mark.parametrize(("file", "place"), [("a.parquet", "a.parquet: row 3: "), ("a.jsonl", "a.jsonl:3: ")])
def test_a_row_whose_probabilities_do_not_fit_is_named(
    probs: list[float] | None, file: str, place: str, tmp_path: Path
) -> None:
    content = rows([0.5] * 3)
    content[2][LUFFY_PROBS] = probs
    wrong = "without the teacher's prob" if probs is None else f"has {len(probs)} probabilities of the teacher for 2 "
    with pytest.raises(UserError) as caught:
        run(tmp_path, content, GIVEN, file)
    said = str(caught.value)
    assert place in said and wrong in said and "write `off_policy: {behaviour: one}`" in said
    assert not list(tmp_path.glob("run/stages/toy/journal/*")), "nothing was generated"


def test_a_run_does_not_go_on_with_other_probabilities(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "_visits", type(faults._visits)())
    monkeypatch.setenv("LEMMA_FAULT", "rl.before_update:2:EIO")
    with pytest.raises(OSError):
        run(tmp_path, rows([0.25] * 3), GIVEN)
    monkeypatch.delenv("LEMMA_FAULT")
    with pytest.raises(UserError, match="data"):
        run(tmp_path, rows([0.5] * 3), GIVEN)
    run(tmp_path, rows([0.25] * 3), GIVEN)
