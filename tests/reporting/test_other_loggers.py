"""MLflow and Trackio, by the real packages: numbers by step, completions, going on. They run in a process of their own,
from a virtual environment of their own."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lemma.core.errors import UserError
from lemma.core.events import StageStarted
from lemma.reporting.completion_tables import completion_rows
from lemma.reporting.sinks import make_sink
from tests.reporting.loggers_place import python_with_loggers
from tests.reports.made_runs import small_run

LOG = """
import json, sys
from pathlib import Path
from lemma.core.events import Measured, StageEnded, StageStarted
from lemma.reporting.sinks import make_sink

EVENTS = [
    StageStarted("grpo", 0, 3),
    Measured("grpo", 1, "train", {"reward/mean": 0.25, "odd": float("nan")}, {"seconds": 2.0}),
    Measured("grpo", 2, "train", {"reward/mean": 0.5}, {}),
    Measured("grpo", 2, "eval", {"evaluation/gsm8k/pass@4": 0.75}, {}),
    StageEnded("grpo", 3, {"steps": 3}),
]
RECIPE = {"run": {"seed": 0}, "model": {"path": "tiny"}}


def log(name, events):
    with make_sink(run, tensorboard=False, wandb=None, recipe=RECIPE, console=False, loggers=[name]) as sink:
        for event in events:
            sink(event)


run = Path(sys.argv[1])
"""

MLFLOW = """
log("mlflow", EVENTS[:2])
log("mlflow", [EVENTS[0], *EVENTS[2:]])
import mlflow
client = mlflow.MlflowClient((run / "mlflow").as_uri())
runs = client.search_runs([client.get_experiment_by_name("lemma").experiment_id])
number = runs[0].info.run_id
path = mlflow.artifacts.download_artifacts(artifact_uri=f"{runs[0].info.artifact_uri}/grpo/completions.json")
seen = {
    "runs": len(runs),
    "status": runs[0].info.status,
    "metrics": runs[0].data.metrics,
    "history": [(one.step, one.value) for one in client.get_metric_history(number, "grpo/train/reward/mean")],
    "artifacts": [one.path for one in client.list_artifacts(number)],
    "table": json.loads(Path(path).read_text()),
}
"""

TELL = "Path(sys.argv[2]).write_text(json.dumps(seen, default=str))"

TRACKIO = """
log("trackio", EVENTS)
from trackio.sqlite_storage import SQLiteStorage
seen = SQLiteStorage.get_logs("lemma", "run")
"""


def found(script: str, run: Path, **settings: str) -> Any:
    """What a script has seen, by JSON: the packages print as they like."""
    python, to = python_with_loggers(), run.with_name("seen.json")
    places = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "TRACKIO_"))}
    done = subprocess.run(
        [str(python), "-c", LOG + script + TELL, str(run), str(to)],
        capture_output=True, text=True, timeout=120, cwd=run, env=places | settings,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(to.read_text())


def test_completions_are_those_of_the_journal(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", steps=2)
    rows = completion_rows(run, "grpo", 2, most=3)
    assert [row["completion"][:5] for row in rows] == ["2 + 0"] * 3
    assert (rows[0]["verdict"], rows[0]["reward"], rows[0]["gold"]) == ("right", 1.0, "10")
    assert completion_rows(run, "grpo", 99) == [] and completion_rows(run, "sft", 1) == []


def test_mlflow_has_numbers_by_step_completions_and_one_run_however_often_it_starts(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", steps=2)
    seen = found(MLFLOW, run)
    assert (seen["runs"], seen["status"]) == (1, "FINISHED")
    assert sorted(map(tuple, seen["history"])) == [(1, 0.25), (2, 0.5)]
    assert seen["metrics"]["grpo/eval/evaluation/gsm8k/pass_4"] == 0.75 and "grpo/train/odd" not in seen["metrics"]
    assert {"recipe.yaml", "grpo"} <= set(seen["artifacts"])
    said = seen["table"]["columns"].index("completion")
    expected = [row["completion"] for row in completion_rows(run, "grpo", 1)]
    assert [row[said] for row in seen["table"]["data"]] == expected and len(expected) == 8


def test_trackio_has_numbers_and_completions(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", steps=2)
    logged = found(TRACKIO, run, TRACKIO_DIR=str(tmp_path / "trackio"))
    assert [row["grpo/train/reward/mean"] for row in logged if "grpo/train/reward/mean" in row] == [0.25, 0.5]
    tables = [row["grpo/completions"] for row in logged if "grpo/completions" in row]
    assert tables and completion_rows(run, "grpo", 1)[0]["completion"] in json.dumps(tables)


@pytest.mark.parametrize("name", ["mlflow", "trackio"])
def test_a_logger_that_is_not_installed_is_one_sentence(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, name, None)
    with (
        pytest.raises(UserError, match=f"run.loggers names {name}, which is not installed"),
        make_sink(tmp_path, tensorboard=False, wandb=None, recipe={}, console=False, loggers=[name]) as sink,
    ):
        sink(StageStarted("grpo", 0, 3))
