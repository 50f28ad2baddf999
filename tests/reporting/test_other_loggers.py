"""MLflow and Trackio, by the real packages where they are installed: numbers by step, completions, going on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lemma.core.errors import UserError
from lemma.core.events import Event, Measured, StageEnded, StageStarted
from lemma.reporting.completion_tables import completion_rows
from lemma.reporting.sinks import make_sink
from tests.reports.made_runs import small_run

RECIPE = {"run": {"seed": 0}, "model": {"path": "tiny"}}
EVENTS: list[Event] = [
    StageStarted("grpo", 0, 3),
    Measured("grpo", 1, "train", {"reward/mean": 0.25, "odd": float("nan")}, {"seconds": 2.0}),
    Measured("grpo", 2, "train", {"reward/mean": 0.5}, {}),
    Measured("grpo", 2, "eval", {"evaluation/gsm8k/pass@4": 0.75}, {}),
    StageEnded("grpo", 3, {"steps": 3}),
]


def log(run_dir: Path, name: str, events: list[Event]) -> None:
    with make_sink(run_dir, tensorboard=False, wandb=None, recipe=RECIPE, console=False, loggers=[name]) as sink:
        for event in events:
            sink(event)


def test_completions_are_those_of_the_journal(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", steps=2)
    rows = completion_rows(run, "grpo", 2, most=3)
    assert [row["completion"][:5] for row in rows] == ["2 + 0"] * 3
    assert (rows[0]["verdict"], rows[0]["reward"], rows[0]["gold"]) == ("right", 1.0, "10")
    assert completion_rows(run, "grpo", 99) == [] and completion_rows(run, "sft", 1) == []


def test_mlflow_has_numbers_by_step_completions_and_one_run_however_often_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow: Any = pytest.importorskip("mlflow", reason="needs mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run = small_run(tmp_path / "run", steps=2)
    log(run, "mlflow", EVENTS[:2])
    log(run, "mlflow", [EVENTS[0], *EVENTS[2:]])
    client = mlflow.MlflowClient((run / "mlflow").as_uri())
    (found,) = client.search_runs([client.get_experiment_by_name("lemma").experiment_id])
    history = client.get_metric_history(found.info.run_id, "grpo/train/reward/mean")
    assert sorted((one.step, one.value) for one in history) == [(1, 0.25), (2, 0.5)]
    assert found.data.metrics["grpo/eval/evaluation/gsm8k/pass_4"] == 0.75
    assert "grpo/train/odd" not in found.data.metrics and found.info.status == "FINISHED"
    names = {one.path for one in client.list_artifacts(found.info.run_id)}
    assert "recipe.yaml" in names and "grpo" in names


def test_trackio_has_numbers_and_completions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio", reason="needs trackio")
    run = small_run(tmp_path / "run", steps=2)
    log(run, "trackio", EVENTS)
    from trackio.sqlite_storage import SQLiteStorage

    logged = SQLiteStorage.get_logs("lemma", "run")
    assert [row["grpo/train/reward/mean"] for row in logged if "grpo/train/reward/mean" in row] == [0.25, 0.5]
    assert any("grpo/completions" in row for row in logged)


@pytest.mark.parametrize("name", ["mlflow", "trackio"])
def test_a_logger_that_is_not_installed_is_one_sentence(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(UserError, match=f"run.loggers names {name}, which is not installed"):
        log(tmp_path, name, EVENTS)
