"""Two runs side by side: options that differ, where their curves ended, and their evaluations by the paired test."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from textwrap import shorten
from typing import Any

from lemma.reporting.console import number
from lemma.reports.curves import Curves, Number
from lemma.reports.page_data import differences
from lemma.reports.run_reader import RunReader
from lemma.reports.shown_evaluations import Comparisons, pairs_between

# Numbers of a stage that are compared, if both runs have them.
COMPARED = (
    "reward/mean", "right", "format", "length/mean", "truncated", "entropy/sampled", "kl", "groups/live", "margin",
    "loss", "grad_norm", "validation/loss",
)  # fmt: skip
# A curve's end is its mean over this share of the steps that both runs have.
END_SHARE = 0.1
# Characters of an option's value that are shown.
LONGEST_VALUE = 80


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

    def in_words(self) -> Iterator[str]:
        """The lines that a terminal shows."""
        yield "Options that differ:"
        for one in self.options:
            first, second = (shorten(value, LONGEST_VALUE, placeholder=" ...") for value in one["values"])
            yield f"  {one['key']}: {first} in A, {second} in B"
        if not self.options:
            yield "  none"
        stage = ""
        for end in self.curves:
            if end.stage != stage:
                stage = end.stage
                yield f"\nStage {stage}, mean of the last tenth of {end.last_step} steps:"
            yield f"  {end.name:<18} A {number(end.first):>9}   B {number(end.second):>9}"
        if self.evaluations:
            yield "\nEvaluations, problem by problem:"
        for row in self.evaluations:
            yield f"  {row['benchmark']} ({row['b']} against {row['a']}): {row['words']}"
            yield (
                f"    A {100 * row['first']:.1f}%, B {100 * row['second']:.1f}% on {row['problems']:,} problems; "
                f"B gains {row['gained']:,} and loses {row['lost']:,}"
            )


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
