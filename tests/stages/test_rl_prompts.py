"""Rows that are only a prompt: accepted where no reward needs a gold answer, refused with its name where one does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lemma.cli import main
from lemma.core.errors import UserError
from lemma.core.events import Measured, StageEnded
from lemma.reporting.console import evaluated
from lemma.rollouts import read_episodes
from tests.algorithms import toy
from tests.stages.test_rl_stage import SMALL, small_stage


def prompts(folder: Path, *, as_messages: bool = False) -> dict[str, Any]:
    """Data of eight rows with a prompt and nothing else."""
    asked = [f"{number} pens ?" for number in range(8)]
    rows = [{"prompt": [{"role": "user", "content": one}] if as_messages else one} for one in asked]
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"source": str(path)}


def stage(folder: Path, **changes: Any) -> dict[str, Any]:
    held_out = {"share": 0.25, "every": 1}
    return small_stage(
        folder, **{"data": prompts(folder), "validation": held_out, "checkpoint": {"every": 1}} | changes
    )


def seen(folder: Path, **changes: Any) -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    return toy.Toy(folder).train(stage(folder, **changes), **SMALL)


def test_prompts_are_trained_on_and_measured_by_their_rewards(tmp_path: Path) -> None:
    world = toy.Toy(tmp_path)
    rows = world.train(stage(tmp_path), **SMALL)
    trained = [row for row in rows if "reward/mean" in row]
    assert len(trained) == 2 and all(row["unscored"] == 0 and "right" not in row for row in trained)
    assert any(row["groups/live"] for row in trained)
    measured = [row for row in rows if "evaluation/validation/reward" in row]
    assert [row["step"] for row in measured] == [0, 1, 2]
    assert not any("answer_accuracy" in name for row in measured for name in row)
    (ended,) = (event for event in world.events if isinstance(event, StageEnded))
    best = max(row["evaluation/validation/reward"] for row in measured[1:])
    assert ended.summary["best validation/reward"] == best
    told = [evaluated(event) for event in world.events if isinstance(event, Measured) and event.axis == "eval"]
    assert len(told) == 3 and all(": validation reward " in line and "lenient" not in line for line in told)


def test_a_run_on_prompts_goes_on_and_is_planned_and_reported(tmp_path: Path, capsys: Any) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    full = seen(whole, steps=3, data=prompts(tmp_path))
    seen(parts, steps=2, data=prompts(tmp_path))
    resumed = seen(parts, steps=3, data=prompts(tmp_path))
    assert resumed == full
    journals = [sorted(toy.Toy(folder).run.glob("stages/toy/journal/step-*")) for folder in (whole, parts)]
    assert len(journals[0]) == 3
    for one, other in zip(*journals, strict=True):
        said = [[(x.key, x.sample, x.text, x.reward, x.verdict) for x in read_episodes(path)] for path in (one, other)]
        assert said[0] == said[1] and said[0]
    assert main(["plan", str(whole / "recipe.yaml")]) == 0
    assert "6 problems" in capsys.readouterr().out
    assert main(["report", str(whole / "run")]) == 0
    capsys.readouterr()
    assert main(["debug", str(toy.Toy(whole).run), "--groups", "2", "--device", "cpu"]) == 0
    told = capsys.readouterr().out
    assert "of the answers are right" not in told and "could not be graded" not in told


def test_messages_are_the_same_prompts_as_text(tmp_path: Path) -> None:
    text, messages = tmp_path / "text", tmp_path / "messages"
    as_messages = prompts(tmp_path, as_messages=True)
    rows = seen(messages, data=as_messages)
    assert seen(text, data=prompts(tmp_path)) == rows


@pytest.mark.parametrize(
    ("reward", "name"),
    [
        ("accuracy", "accuracy"),
        ("numbers", "numbers"),
        ("length", "length"),
        ({"name": "graded", "grader": "boxed_slow"}, "boxed_slow"),
        ({"name": "correctness", "compat": True}, "correctness"),
    ],
)
def test_a_reward_that_needs_a_gold_is_named(reward: Any, name: str, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=f"prompts.jsonl:1: this row lacks an answer .*the reward {name} needs"
    ) as error:
        seen(tmp_path / "run", rewards=["format", reward], data=prompts(tmp_path))
    assert "`columns: {answer: NAME}`" in str(error.value)
    assert main(["plan", str(tmp_path / "run" / "recipe.yaml")]) == 1
