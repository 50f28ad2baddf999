"""MLflow, if `run.loggers` names it. MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME are honoured; without the first,
everything goes into the run folder."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lemma.core.errors import UserError
from lemma.core.events import Event, Measured, StageEnded, StageStarted
from lemma.core.files import write_whole
from lemma.reporting.completion_tables import completion_rows, is_due

RUN_ID = "mlflow_run_id"
# Characters that MLflow does not accept in names.
STRANGE = re.compile(r"[^\w\-. /:]")


class MLflow:
    """One MLflow run for a run of Lemma, however often it is started; starts with the first stage."""

    name = "MLflow"

    def __init__(self, run_dir: Path, recipe: Mapping[str, Any], say: Callable[[str], None]):
        try:
            import mlflow
        except ImportError as error:
            raise UserError(
                "run.loggers names mlflow, which is not installed",
                fix="install it with `pip install mlflow-skinny`, or leave it out",
            ) from error
        self.troubles: tuple[type[Exception], ...] = (OSError, mlflow.MlflowException)
        self._folder, self._recipe, self._say = run_dir, recipe, say
        self._client: Any = None
        self._run = ""

    def _start(self) -> None:
        from mlflow import MlflowClient, MlflowException

        place = os.environ.get("MLFLOW_TRACKING_URI") or (self._folder / "mlflow").resolve().as_uri()
        # A folder of files is enough for one run; MLflow asks to be told so.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "lemma"
        try:
            self._client = MlflowClient(place)
            known = self._client.get_experiment_by_name(name)
            experiment = self._client.create_experiment(name) if known is None else known.experiment_id
            self._run = self._same_run(experiment)
            self._client.log_dict(self._run, dict(self._recipe), "recipe.yaml")
        except (OSError, MlflowException) as error:
            raise UserError(
                f"MLflow does not start ({error})", fix="check MLFLOW_TRACKING_URI, or leave it out of run.loggers"
            ) from error
        self._say(f"MLflow: {place}, experiment {name}")

    def _same_run(self, experiment: str) -> str:
        """The id that every start of this run shares."""
        path = self._folder / RUN_ID
        if path.is_file():
            number = path.read_text().strip()
            self._client.update_run(number, status="RUNNING")
            return number
        number = str(self._client.create_run(experiment, run_name=self._folder.name).info.run_id)
        write_whole(path, number + "\n")
        return number

    def __call__(self, event: Event) -> None:
        if isinstance(event, StageStarted) and self._client is None:
            self._start()
        if self._client is None:
            return
        if isinstance(event, Measured):
            self._measured(event)
        elif isinstance(event, StageEnded):
            for name, value in event.summary.items():
                self._client.set_tag(self._run, _name(f"{event.stage}/{name}"), str(value)[:5000])

    def _measured(self, event: Measured) -> None:
        import time

        from mlflow.entities import Metric

        now = int(1000 * time.time())
        values = {**event.values, **event.timings}
        metrics = [
            Metric(_name(f"{event.stage}/{event.axis}/{name}"), float(value), now, event.step)
            for name, value in values.items()
            if math.isfinite(value)
        ]
        for first in range(0, len(metrics), 1000):
            self._client.log_batch(self._run, metrics=metrics[first : first + 1000])
        if event.axis == "train" and is_due(event.step):
            rows = completion_rows(self._folder, event.stage, event.step)
            if rows:
                columns = {name: [row[name] for row in rows] for name in rows[0]}
                self._client.log_table(self._run, columns, f"{event.stage}/completions.json")

    def close(self, failed: bool) -> None:
        if self._client is not None:
            self._client.set_terminated(self._run, "FAILED" if failed else "FINISHED")


def _name(name: str) -> str:
    return STRANGE.sub("_", name)
