"""What of a run is measured, and in what: a checkpoint, the run's environment."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import lemma
from lemma.cli import main
from lemma.core.events import Awaited, Event, Said
from lemma.evaluation.results import read_report
from lemma.recipe import Recipe
from lemma.runs.run import train
from tests.evaluation.test_in_environment import STAIRS
from tests.stages.sft_world import World

QUICK = ("--benchmarks", "arithmetic", "--limit", "4", "--max-tokens", "4", "--device", "cpu")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = World(tmp_path_factory.mktemp("trained"))
    assert world.train(world.recipe()) == 0
    return world


def test_a_checkpoint_is_measured_by_its_step_its_name_and_its_folder(trained: World, tmp_path: Path) -> None:
    checkpoints = trained.run / "stages" / "sft" / "checkpoints"
    best = json.loads((checkpoints / "best.json").read_text())["step"]
    first = min(checkpoints.glob("step-*"))
    step = int(first.name.removeprefix("step-"))
    for name, words, which in (
        ("step", [str(trained.run), "--checkpoint", str(step)], step),
        ("folder", [str(first)], step),
        ("best", [str(trained.run / "stages" / "sft"), "--checkpoint", "best"], best),
    ):
        assert main(["eval", *words, "--to", str(tmp_path / name), *QUICK]) == 0
        assert read_report(tmp_path / name).model["name"] == str(trained.run / "export" / f"sft-{which}-merged")
    found = [read_report(tmp_path / name).rows for name in ("step", "folder")]
    assert found[0] == found[1]
    report = json.loads((tmp_path / "step" / "metadata.json").read_text())
    own, rows = report["benchmarks"]["arithmetic"], found[0]["arithmetic"]
    assert (own["total"], own["correct"]) == (4, sum(row.verdict == "right" for row in rows))
    assert report["seconds"] > 0 and own["settings"]["format"]["preamble"] is False
    whole = json.loads((tmp_path / "step" / "results.json").read_text())
    assert whole["benchmarks"]["arithmetic"]["right"] == own["correct"]


def test_checkpoints_that_are_not_there(trained: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(trained.run), "--checkpoint", "5", *QUICK]) == 2
    assert "stage sft has no checkpoint '5'; steps on disk: " in capsys.readouterr().err
    assert main(["eval", str(tmp_path), "--checkpoint", "5", *QUICK]) == 2
    assert "has no checkpoints; give the folder of a run" in capsys.readouterr().err


def test_an_export_that_is_older_than_the_checkpoint_is_not_measured(trained: World) -> None:
    folder = trained.run / "export" / "sft-6-merged"
    folder.mkdir(parents=True, exist_ok=True)

    os.utime(folder, (0, 0))
    with pytest.raises(lemma.UserError, match="is older than the checkpoint of step 6"):
        lemma.evaluate(trained.run, "arithmetic", checkpoint=6, limit=1, device="cpu")


def test_an_environment_by_its_name_is_played_as_in_the_run(tmp_path: Path) -> None:
    (tmp_path / "stairs.py").write_text(STAIRS)
    stairs = f"{tmp_path / 'stairs.py'}:Stairs"
    stage: dict[str, Any] = {
        "kind": "rl", "algorithm": {"name": "grpo", "group_size": 2}, "rollout": {"max_tokens": 2},
        "environment": {"name": stairs, "turns": 2, "unknown_limit": 1.0}, "batch": {"problems": 2}, "steps": 1,
        "data": {"source": "environment", "split": "dev"},
    }  # fmt: skip
    recipe = {
        "run": {"dir": str(tmp_path / "run"), "threads": 1, "tensorboard": False, "device": "cpu"},
        "model": {"tiny": {"hidden": 32, "layers": 1, "feed_forward": 32, "heads": 2, "kv_heads": 1}},
        "format": "r1_zero", "stages": {"rl": stage},
    }  # fmt: skip
    assert train(Recipe.model_validate(recipe), sink=lambda event: None) == 0
    events: list[Event] = []
    how: dict[str, Any] = {"max_tokens": 2, "device": "cpu", "sink": events.append}
    found = lemma.evaluate(tmp_path / "run", environment=stairs, out=tmp_path / "own", **how)
    assert found.report.settings["Stairs"]["environment"]["turns"] == 2
    awaited = [event.what for event in events if isinstance(event, Awaited)]
    assert awaited == ["loading the model", ""]
    said = [event.text for event in events if isinstance(event, Said)]
    assert any("Stairs is played as in the model's run (turns: 2" in text for text in said)
    whole = {"name": stairs, "turns": 4}
    found = lemma.evaluate(tmp_path / "run", environment=whole, out=tmp_path / "other", **how)
    assert found.report.settings["Stairs"]["environment"]["turns"] == 4
