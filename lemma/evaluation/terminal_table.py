"""The outcome of an evaluation for a person at a terminal: aligned columns, as many as fit."""

from __future__ import annotations

import textwrap

from lemma.evaluation.metrics import Score
from lemma.evaluation.results import Report, settings_lines

# In the order in which they stand; where there is no room, the one with the highest number goes first.
COLUMNS = {
    "benchmark": 0, "metric": 1, "%": 0, "95% interval": 2, "lenient %": 3, "format %": 4, "cut off %": 5, "n": 6,
    "k": 9, "tokens": 7, "turns": 8, "unknown": 10,
}  # fmt: skip


def as_table(report: Report, width: int) -> str:
    """A table of at most `width` columns, and below it what was measured with what."""
    rows = [row for name in report.summaries for row in _rows(report, name)]
    if len(report.summaries) > 1:
        rows.append({"benchmark": "mean", **_score(report.mean)})
    used = [name for name in COLUMNS if any(row.get(name) for row in rows)]
    while True:
        sizes = {name: max(len(name), *(len(row.get(name, "")) for row in rows)) for name in used}
        if sum(sizes.values()) + 2 * (len(used) - 1) <= width or len(used) <= 2:
            break
        used.remove(max(used, key=lambda name: COLUMNS[name]))
    lines = [_line(dict(zip(used, used, strict=True)), sizes), *(_line(row, sizes) for row in rows)]
    told = [part for line in settings_lines(report) for part in textwrap.wrap(line, width, break_long_words=False)]
    return "\n".join([*lines, "", *told]) + "\n"


def _line(row: dict[str, str], sizes: dict[str, int]) -> str:
    """Names to the left, numbers to the right."""
    cells = [
        row.get(name, "").ljust(size) if name in ("benchmark", "metric") else row.get(name, "").rjust(size)
        for name, size in sizes.items()
    ]
    return "  ".join(cells).rstrip()


def _score(score: Score) -> dict[str, str]:
    return {"%": f"{100 * score.value:.1f}", "95% interval": f"{100 * score.low:.1f} to {100 * score.high:.1f}"}


def _rows(report: Report, name: str) -> list[dict[str, str]]:
    summary, (label, score) = report.summaries[name], report.headline(name)
    row = {"benchmark": name, "metric": label, **_score(score), "n": f"{summary.n:,}", "k": str(summary.k)}
    if report.settings[name].get("scoring") == "likelihood":
        other = {"acc": "acc_norm", "acc_norm": "acc"}[label]
        second = summary.accuracy if other == "acc" else summary.scores[other]
        return [row, {"benchmark": "", "metric": other, **_score(second)}]
    shares = {"lenient %": "lenient", "format %": "format", "cut off %": "truncated"}
    row |= {column: f"{100 * summary.scores[key].value:.1f}" for column, key in shares.items() if key in summary.scores}
    row["tokens"] = f"{summary.numbers['tokens']:,.0f}"
    if "turns" in summary.numbers:
        row["turns"] = f"{summary.numbers['turns']:.1f}"
    own = [
        {"benchmark": "", "metric": measure, **_score(summary.scores[measure]), "n": f"{len(values):,}"}
        for measure, values in report.measures.get(name, {}).items()
    ]
    return [row | ({"unknown": str(summary.unknown)} if summary.unknown else {}), *own]
