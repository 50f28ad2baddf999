"""Problems that a reinforcement stage holds out, and functions of TRL that it is paid by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lemma.core.events import StageEnded
from lemma.rollouts import read_episodes
from tests.algorithms import toy
from tests.stages.test_rl_stage import SMALL, small_stage

VALUES = "evaluation/validation/answer_accuracy"


def run(folder: Path, **changes: Any) -> toy.Toy:
    world = toy.Toy(folder)
    world.train(small_stage(folder, **changes), **SMALL)
    return world


def asked(world: toy.Toy) -> set[str]:
    """The problems that were sampled for training."""
    files = sorted((world.run / "stages" / "toy" / "journal").iterdir())
    return {episode.problem_id for path in files for episode in read_episodes(path)}


def test_held_out_problems_are_measured_and_never_sampled(tmp_path: Path) -> None:
    world = run(tmp_path, steps=4, epochs=None, validation={"share": 0.25, "every": 2})
    rows = [row for row in world.rows() if VALUES in row]
    assert [row["step"] for row in rows] == [0, 2, 4]
    folder = world.run / "evaluations" / "toy" / "validation"
    held = {row["problem"] for path in folder.glob("step-*/samples*.jsonl") for row in map(json.loads, path.open())}
    assert held and not held & asked(world)
    best = json.loads((world.run / "stages" / "toy" / "checkpoints" / "best.json").read_text())
    first = max(rows[1:], key=lambda row: row[VALUES])
    assert best == {"step": first["step"], "score": first[VALUES], "metric": "validation/answer_accuracy"}
    (ended,) = (event for event in world.events if isinstance(event, StageEnded))
    assert ended.summary["best validation/answer_accuracy"] == first[VALUES] >= 0 and "best loss" not in ended.summary
    assert not str(best["score"]).startswith("-"), "0 is 0.0"


def test_other_data_may_be_held_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text("".join(json.dumps({"question": f"{n} ?", "answer": str(n)}) + "\n" for n in range(5)))
    world = run(tmp_path, validation={"data": {"source": str(path)}, "count": 3})
    results = json.loads(
        next((world.run / "evaluations" / "toy" / "validation").glob("step-*/results.json")).read_text()
    )
    assert results["benchmarks"]["validation"]["n"] == 3


@pytest.mark.parametrize("share", [None, 0.9])
def test_a_held_out_problem_may_occur_twice(share: float | None, tmp_path: Path) -> None:
    path = tmp_path / "twice.jsonl"
    path.write_text("".join(json.dumps({"question": f"{n % 3} ?", "answer": str(n % 3)}) + "\n" for n in range(6)))
    given = {"data": {"source": str(path)}} if share is None else {"share": share}
    data = {} if share is None else {"data": {"source": str(path)}}
    world = run(tmp_path, validation={**given, "every": 1}, **data)
    results = next((world.run / "evaluations" / "toy" / "validation").glob("step-*/results.json"))
    assert json.loads(results.read_text())["benchmarks"]["validation"]["n"] == (6 if share is None else 4)


def test_a_function_of_trl_gets_the_columns_of_the_data(tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text(
        "def by_column(completions, tag, prompts, **columns):\n"
        "    assert all(isinstance(one, str) for one in completions) and 'question' in columns\n"
        "    return [float(len(one) % 2) + 10 * float(mark == 'x') for one, mark in zip(completions, tag)]\n"
    )
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"question": f"{n} ?", "answer": str(n), "tag": "x"}) + "\n" for n in range(8)))
    world = run(tmp_path, data={"source": str(path)}, rewards=[{"trl": f"{tmp_path}/theirs.py:by_column"}])
    rewards = [row["rewards/by_column/mean"] for row in world.rows() if "rewards/by_column/mean" in row]
    assert rewards and all(10 <= value <= 11 for value in rewards)
