"""The numbers of a run as columns, read incrementally from metrics.jsonl."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lemma.core.files import from_json
from lemma.reports.tailed import TailedFile

Number = float | None


@dataclass
class Curves:
    """The rows of one stage on one axis, in columns; a number that a row lacks is None."""

    steps: list[int] = field(default_factory=list)
    values: dict[str, list[Number]] = field(default_factory=dict)
    timings: dict[str, list[Number]] = field(default_factory=dict)
    held_by: list[str] = field(default_factory=list)

    def add(self, row: dict[str, Any]) -> None:
        count = len(self.steps)
        timings = row.pop("timings", None) or {}
        self.steps.append(int(row.pop("step")))
        self.held_by.append(str(timings.pop("held_by", "")))
        for columns, cells in ((self.values, row), (self.timings, timings)):
            for name, value in cells.items():
                if isinstance(value, int | float):
                    columns.setdefault(name, [None] * count).append(_short(value))
            for column in columns.values():
                if len(column) == count:
                    column.append(None)

    def after(self, count: int) -> dict[str, Any]:
        """As JSON, without the first `count` rows."""
        return {
            "steps": self.steps[count:],
            "values": {name: column[count:] for name, column in self.values.items()},
            "timings": {name: column[count:] for name, column in self.timings.items()},
            "held_by": self.held_by[count:],
        }

    def last(self, name: str) -> Number:
        """The newest value of a number."""
        column = self.values.get(name) or self.timings.get(name) or []
        return next((value for value in reversed(column) if value is not None), None)


def _short(value: float) -> Number:
    """Rounded to six digits, more than a screen shows; None if it is not finite."""
    if isinstance(value, bool) or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")


class Metrics:
    """All curves of a run, by stage and axis. `generation` changes when earlier rows become void."""

    def __init__(self, path: Path):
        self._file = TailedFile(path)
        self.generation = 0
        self.curves: dict[tuple[str, str], Curves] = {}

    def look(self) -> None:
        lines = self._file.look()
        if self._file.rewritten != self.generation:
            self.generation = self._file.rewritten
            self.curves = {}
        for line in lines:
            try:
                row = from_json(line)
                stage, axis = str(row.pop("stage")), str(row.pop("axis"))
                self.curves.setdefault((stage, axis), Curves()).add(row)
            except (ValueError, KeyError, TypeError, AttributeError):
                continue  # a damaged line is no reason not to show the others
