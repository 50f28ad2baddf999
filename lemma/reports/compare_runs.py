"""Two runs side by side: options that differ, where their curves ended, and their evaluations by the paired test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lemma.reports.curves import Curves, Number
from lemma.reports.page_data import differences
from lemma.reports.run_reader import RunReader
from lemma.reports.shown_evaluations import Comparisons, pairs_between

# Numbers of a stage that are compared, if both runs have them.
COMPARED = (
    "reward/mean",
    "right",
    "format",
    "length/mean",
    "truncated",
    "entropy/sampled",
    "kl",
    "groups/live",
    "margin",
    "loss",
    "grad_norm",
    "validation/loss",
)
# A curve's end is its mean over this share of the steps that both runs have.
END_SHARE = 0.1


@dataclass(frozen=True)
class CurveEnds:
    """The means of one number at the end of the steps that both runs have."""

    stage: str
    name: str
    first: float
    second: float
    last_step: int


@dataclass(frozen=True)
class ComparedRuns:
    options: list[dict[str, Any]]
    curves: list[CurveEnds]
    evaluations: list[dict[str, Any]]
    doubts: list[str] = field(default_factory=list)


def compare_runs(first: RunReader, second: RunReader) -> ComparedRuns:
    for run in (first, second):
        run.look()
    shared = [stage for stage in first.stages if stage in second.stages]
    doubts = [f"{run.name} is {run.state}" for run in (first, second) if run.state != "finished"]
    if not shared:
        doubts.append("the two runs have no stage of the same name, so that no curve can be compared")
    ends = [end for stage in shared for end in _ends(stage, first, second)]
    evaluations = Comparisons().of(pairs_between(first, second))
    return ComparedRuns(differences([first, second]), ends, evaluations, doubts)


def _ends(stage: str, first: RunReader, second: RunReader) -> list[CurveEnds]:
    ends = []
    for axis in ("train", "eval"):
        mine, theirs = (run.metrics.curves.get((stage, axis)) for run in (first, second))
        if mine is None or theirs is None or not mine.steps or not theirs.steps:
            continue
        last = min(mine.steps[-1], theirs.steps[-1])
        for name in COMPARED:
            a, b = _end(mine, name, last), _end(theirs, name, last)
            if a is not None and b is not None:
                ends.append(CurveEnds(stage, name, a, b, last))
    return ends


def _end(curves: Curves, name: str, last: int) -> Number:
    column = curves.values.get(name, ())
    known: Sequence[tuple[int, float]] = [
        (step, value) for step, value in zip(curves.steps, column, strict=bool(column)) if value is not None
    ]
    values = [value for step, value in known if last - END_SHARE * last < step <= last]
    return sum(values) / len(values) if values else None
