"""The outcome of an evaluation as a table: in Markdown, and for a person at a terminal as many columns as fit."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lemma.evaluation.metrics import Score

if TYPE_CHECKING:
    from lemma.evaluation.results import Report

# In the order in which they stand; where there is no room, the one with the highest number goes first.
COLUMNS = {
    "benchmark": 0, "metric": 1, "%": 0, "95% interval": 2, "lenient %": 3, "format %": 4, "cut off %": 5, "n": 6,
    "k": 9, "tokens": 7, "turns": 8, "unknown": 10,
}  # fmt: skip


def as_markdown(report: Report) -> str:
    """A table of shares in percent with 95% intervals, and what they were measured with."""
    rows = _rows(report)
    heads = [name for name in COLUMNS if name != "turns" or any("turns" in row for row in rows)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    lines += [f"| {' | '.join(row.get(name, '') for name in heads)} |" for row in rows]
    return "\n".join([*lines, "", *_settings_lines(report)]) + "\n"


def as_table(report: Report, width: int) -> str:
    """A table of at most `width` columns, and below it what was measured with what."""
    rows = _rows(report)
    used = [name for name in COLUMNS if any(row.get(name, "0") != "0" for row in rows)]
    while True:
        sizes = {name: max(len(name), *(len(row.get(name, "")) for row in rows)) for name in used}
        if sum(sizes.values()) + 2 * (len(used) - 1) <= width or len(used) <= 2:
            break
        used.remove(max(used, key=lambda name: COLUMNS[name]))
    lines = [_line(dict(zip(used, used, strict=True)), sizes), *(_line(row, sizes) for row in rows)]
    told = [part for line in _settings_lines(report) for part in textwrap.wrap(line, width, break_long_words=False)]
    return "\n".join([*lines, "", *told]) + "\n"


def _line(row: dict[str, str], sizes: dict[str, int]) -> str:
    """Names to the left, numbers to the right."""
    cells = [
        row.get(name, "").ljust(size) if name in ("benchmark", "metric") else row.get(name, "").rjust(size)
        for name, size in sizes.items()
    ]
    return "  ".join(cells).rstrip()


def _rows(report: Report) -> list[dict[str, str]]:
    rows = [row for name in report.summaries for row in _rows_of(report, name)]
    return rows if len(report.summaries) == 1 else [*rows, {"benchmark": "mean", **_score(report.mean)}]


def _rows_of(report: Report, name: str) -> list[dict[str, str]]:
    """A benchmark's own number; the other accuracy where options were weighed, or what an environment measured."""
    summary, (label, score) = report.summaries[name], report.headline(name)
    row = {"benchmark": name, "metric": label, **_score(score), "n": f"{summary.n:,}", "k": str(summary.k)}
    if report.settings[name].get("scoring") == "likelihood":
        other = {"acc": "acc_norm", "acc_norm": "acc"}[label]
        return [row, row | {"metric": other, **_score(summary.accuracy if other == "acc" else summary.scores[other])}]
    shares = {"lenient %": "lenient", "format %": "format", "cut off %": "truncated"}
    row |= {column: f"{100 * summary.scores[key].value:.1f}" for column, key in shares.items() if key in summary.scores}
    row |= {"tokens": f"{summary.numbers['tokens']:,.0f}", "unknown": str(summary.unknown)}
    if "turns" in summary.numbers:
        row["turns"] = f"{summary.numbers['turns']:.1f}"
    own = [
        {"benchmark": name, "metric": measure, **_score(summary.scores[measure]), "n": f"{len(values):,}"}
        for measure, values in report.measures.get(name, {}).items()
    ]
    return [row, *own]


def _score(score: Score) -> dict[str, str]:
    return {"%": f"{100 * score.value:.1f}", "95% interval": f"{100 * score.low:.1f} to {100 * score.high:.1f}"}


def _settings_lines(report: Report) -> list[str]:
    """The settings that all benchmarks share in one sentence, and those that differ, benchmark by benchmark."""
    shown = {}
    for name, own in report.settings.items():
        fmt = own["format"]
        shown[name] = {
            "temperature": own["temperature"],
            "top-p": own["top_p"],
            "max tokens": own["max_tokens"],
            "format": f"{fmt['name']} ({own['format_hash']})",
            "grader": own["grader"],
            "engine": own["engine"],
            "seed": own["seed"],
            "examples": f"{own['shots']} as {own['shots_as']} ({own['shots_hash']})" if "shots" in own else "none",
            "answers": "the likeliest option" if own.get("scoring") == "likelihood" else "written",
            "environment": _played_in(own.get("environment")),
        }
    for key, usual in (("examples", "none"), ("answers", "written"), ("environment", "none")):
        if all(own[key] == usual for own in shown.values()):
            shown = {name: {k: value for k, value in own.items() if k != key} for name, own in shown.items()}
    first = next(iter(shown.values()))
    common = {key: value for key, value in first.items() if all(own[key] == value for own in shown.values())}
    lines = [f"Model: {report.model['name']}; " + "; ".join(f"{key} {value}" for key, value in common.items()) + "."]
    for name, own in shown.items():
        rest = [f"{key} {value}" for key, value in own.items() if key not in common]
        if rest:
            lines.append(f"{name}: {'; '.join(rest)}.")
    return lines


def _played_in(environment: Mapping[str, Any] | None) -> str:
    if environment is None:
        return "none"
    return f"{environment.get('class') or environment['name']}, at most {environment['turns']} turns"
