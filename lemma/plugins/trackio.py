"""Trackio, if `run.loggers` names it: numbers and completions in Trackio's own folder on this machine, which
`trackio show` opens. TRACKIO_PROJECT names the project."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lemma.core.errors import UserError
from lemma.core.events import Event, Measured, StageStarted
from lemma.reporting.completion_tables import completion_rows, is_due


class Trackio:
    """One Trackio run for a run of Lemma; starts with the first stage, and continues when the run is resumed."""

    name = "Trackio"
    troubles: tuple[type[Exception], ...] = (OSError, RuntimeError, ValueError)

    def __init__(self, run_dir: Path, recipe: Mapping[str, Any], say: Callable[[str], None]):
        try:
            import trackio  # noqa: F401
        except ImportError as error:
            raise UserError(
                "run.loggers names trackio, which is not installed",
                fix="install it with `pip install trackio`, or leave it out",
            ) from error
        self._folder, self._recipe, self._say = run_dir, recipe, say
        self._run: Any = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, StageStarted) and self._run is None:
            self._start()
        if self._run is None or not isinstance(event, Measured):
            return
        row: dict[str, Any] = {f"{event.stage}/{event.axis}_step": event.step}
        for name, value in {**event.values, **event.timings}.items():
            row[f"{event.stage}/{event.axis}/{name}"] = value
        if event.axis == "train" and is_due(event.step):
            rows = completion_rows(self._folder, event.stage, event.step)
            if rows:
                import pandas
                import trackio

                row[f"{event.stage}/completions"] = trackio.Table(dataframe=pandas.DataFrame(rows))
        self._run.log(row)

    def _start(self) -> None:
        import trackio

        project = os.environ.get("TRACKIO_PROJECT", "lemma")
        self._run = trackio.init(project, name=self._folder.resolve().name, config=dict(self._recipe), resume="allow",
                                 embed=False)  # fmt: skip
        self._say(f"Trackio: `trackio show --project {project}` opens it")

    def close(self, failed: bool) -> None:
        if self._run is not None:
            self._run.finish()
