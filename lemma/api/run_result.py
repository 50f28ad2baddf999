"""A run as a Python program sees it: read from its folder when asked, also while it is at work."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lemma.core.events import Axis
from lemma.core.files import read_json_lines
from lemma.recipe import Recipe, load_recipe

if TYPE_CHECKING:
    from lemma.evaluation.results import Report
    from lemma.reports.run_reader import RunReader
    from lemma.reports.run_state import State


@dataclass(frozen=True)
class MetricRow:
    """The numbers of one step. `timings` are seconds and rates, the only numbers that a repeated run may change."""

    stage: str
    step: int
    axis: Axis
    values: dict[str, float]
    timings: dict[str, Any]


@dataclass(frozen=True)
class StageResult:
    """What a stage has reached. `model` is the folder of its finished model, and `step` the last one with metrics."""

    name: str
    is_done: bool
    model: Path | None
    step: int


@dataclass(frozen=True)
class StageEvaluation:
    """An evaluation that a run made: during `stage`, after `step`."""

    stage: str
    step: int
    report: Report


class Run:
    """The folder of a run."""

    def __init__(self, folder: str | Path):
        from lemma.reports.run_state import check_is_run

        self.folder = Path(folder)
        check_is_run(self.folder)

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}, state={self.state!r})"

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe with every value; your own code must be where the recipe says."""
        return load_recipe(self.folder / "recipe.yaml")

    @property
    def state(self) -> State:
        """running, stopped, finished, dead or new."""
        return self._reader().state

    @property
    def stages(self) -> dict[str, StageResult]:
        """All stages of the recipe, in order, whether they began or not."""
        from lemma.runs.run_folder import RunFolder

        folder = RunFolder(self.folder, only_read=True)
        steps: dict[str, int] = {}
        for row in self.metrics():
            steps[row.stage] = max(row.step, steps.get(row.stage, 0))
        return {
            name: StageResult(name, folder.is_done(name), folder.final_model(name), steps.get(name, 0))
            for name in self._reader().stages
        }

    @property
    def model(self) -> Path | None:
        """The folder of the newest finished model; None before the first stage is done."""
        done = [stage.model for stage in self.stages.values() if stage.is_done]
        return done[-1] if done else None

    def metrics(self, stage: str | None = None, axis: Axis | None = None) -> list[MetricRow]:
        """The rows of metrics.jsonl, of all stages or one, of training, of evaluation or both."""
        path = self.folder / "metrics.jsonl"
        rows = map(_metric_row, read_json_lines(path)) if path.is_file() else ()
        return [row for row in rows if stage in (None, row.stage) and axis in (None, row.axis)]

    def evaluations(self, stage: str | None = None) -> list[StageEvaluation]:
        """The evaluations that its stages made, in the order of their steps."""
        from lemma.evaluation.results import read_report

        return [
            StageEvaluation(place.stage, place.step, read_report(place.folder))
            for place in self._reader().evaluations()
            if place.stage and stage in (None, place.stage)
        ]

    def _reader(self) -> RunReader:
        from lemma.reports.run_reader import RunReader

        reader = RunReader(self.folder)
        reader.look()
        return reader


def _metric_row(row: dict[str, Any]) -> MetricRow:
    known = {"stage", "step", "axis", "timings"}
    values = {name: value for name, value in row.items() if name not in known}
    return MetricRow(row["stage"], row["step"], row["axis"], values, row.get("timings", {}))


def load_run(folder: str | Path) -> Run:
    """A run that is finished, stopped or at work, by its folder."""
    return Run(folder)
