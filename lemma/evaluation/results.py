"""What an evaluation leaves on disk, and reading it again.

settings.json   what was measured and how; the same command goes on in a folder with the same settings
journal.jsonl   every sample as it was graded, while the evaluation is at work
samples.jsonl   every sample in order: prompt, completion, extracted answer, gold, verdict, reason
questions.csv   the same for a spreadsheet: question, target, prediction, is_correct
results.json    every number with its interval and its settings
results.csv     the same, one number a line
results.md      a table ready to paste
measures.json   the measures of an environment's own, one number for each thing that counts once
metadata.json   what was measured, the counts of right answers, and the seconds and rates of the last process; only this
                file may differ when an evaluation is repeated
"""

from __future__ import annotations

import csv
import fcntl
import io
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from lemma.config.document import leaves
from lemma.core.errors import UserError
from lemma.core.files import from_json, leads_out, read_json_lines, write_whole
from lemma.core.whole_files import WholeFiles
from lemma.evaluation.eval_row import QUESTION_COLUMNS, EvalRow, csv_line, end_of_line, lines_of
from lemma.evaluation.metrics import Score, Summary, Ties, mean_over_benchmarks, summarise
from lemma.evaluation.tables import as_markdown

VERSION = 1


ACCURACY = {"likelihood": "acc", "environment": "success"}
"""What the mean over samples is called where no grader gave the verdicts."""


@dataclass(frozen=True)
class Report:
    """The outcome of an evaluation: for each benchmark its settings, its numbers and its samples in order; and where an
    environment has measures of its own, their values."""

    model: dict[str, Any]
    settings: dict[str, dict[str, Any]]
    summaries: dict[str, Summary]
    rows: dict[str, list[EvalRow]]
    measures: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    @property
    def mean(self) -> Score:
        """The mean of the numbers in the table."""
        return mean_over_benchmarks([self.headline(name)[1] for name in self.summaries])

    def headline(self, name: str) -> tuple[str, Score]:
        """The number that tables show for a benchmark, and its name."""
        summary, kind = self.summaries[name], self.settings[name]["metric"]
        names = [name for name in (kind, f"{kind}@{summary.k}") if name in summary.scores]
        label = names[0] if names else f"avg@{summary.k}"
        shown = ACCURACY.get(self.settings[name].get("scoring", ""), label) if label.startswith("avg") else label
        return shown, summary.scores[label]


def make_report(
    model: Mapping[str, Any],
    settings: Mapping[str, Mapping[str, Any]],
    rows: Mapping[str, Sequence[EvalRow]],
    measures: Mapping[str, dict[str, list[float]]] | None = None,
) -> Report:
    """Numbers from samples; the same samples give the same numbers."""
    summaries, measures = {}, dict(measures or {})
    for name, own in rows.items():
        is_played = settings[name].get("scoring") == "environment"
        if is_played and all(row.verdict == "unknown" for row in own):
            raise UserError(
                f"the environment could not score any episode of {name}: {own[0].reason}",
                fix="repair it, and evaluate in another folder",
            )
        groups: dict[str, list[EvalRow]] = {}
        for row in own:
            groups.setdefault(row.problem, []).append(row)
        members = [sorted(group, key=lambda row: row.sample) for group in groups.values()]
        ties: Ties = settings[name]["ties"]
        summaries[name] = summarise(
            [group[0] for group in members],
            [[row.mark for row in group] for group in members],
            ties=ties,
            measures=measures.get(name, {}) if is_played else None,
        )
    return Report(
        dict(model),
        {name: dict(one) for name, one in settings.items()},
        summaries,
        {name: list(own) for name, own in rows.items()},
        measures,
    )


# --- writing ---------------------------------------------------------------------------------------------------


def write_report(folder: Path, report: Report, timings: Mapping[str, Any] | None = None) -> None:
    """All files but the settings; results.json comes last, and says that the evaluation is complete."""
    rows = [row for own in report.rows.values() for row in own]
    lines = [row.lines or lines_of(row) for row in rows]
    with WholeFiles(folder) as files:
        samples = (start + end_of_line(row) for row, (start, _) in zip(rows, lines, strict=True))
        files.write("samples.jsonl", b"".join(samples))
        files.write("questions.csv", b"".join([csv_line(QUESTION_COLUMNS), *(line for _, line in lines)]))
        if report.measures:
            files.write("measures.json", json.dumps(report.measures, indent=1, ensure_ascii=False) + "\n")
        files.write("results.csv", _results_csv(report))
        files.write("results.md", as_markdown(report))
        files.write("metadata.json", json.dumps(_metadata(report, timings or {}), indent=1, ensure_ascii=False) + "\n")
        files.write("results.json", json.dumps(as_json(report), indent=1, ensure_ascii=False) + "\n")


def _metadata(report: Report, timings: Mapping[str, Any]) -> dict[str, Any]:
    """An evaluation in brief: the model, when and how fast, and of each benchmark the counts and the settings."""
    benchmarks = {}
    for name, summary in report.summaries.items():
        label, score = report.headline(name)
        benchmarks[name] = {
            **_counts(report, name),
            "unknown": summary.unknown,
            "metric": label,
            **score.as_dict(),
            "settings": report.settings[name],
        }
    return {"version": VERSION, "model": report.model, **timings, "benchmarks": benchmarks}


def _counts(report: Report, name: str) -> dict[str, int]:
    rows = report.rows[name]
    return {
        "problems": report.summaries[name].n,
        "total": len(rows),
        "correct": sum(row.verdict == "right" for row in rows),
    }


def as_json(report: Report) -> dict[str, Any]:
    def kinds(groups: Mapping[str, tuple[int, Score]]) -> dict[str, Any]:
        return {name: {"n": n, **score.as_dict()} for name, (n, score) in groups.items()}

    benchmarks = {}
    for name, summary in report.summaries.items():
        label, score = report.headline(name)
        benchmarks[name] = {
            "headline": {"metric": label, **score.as_dict()},
            "n": summary.n,
            "k": summary.k,
            "right": _counts(report, name)["correct"],
            "unknown": summary.unknown,
            "scores": {metric: one.as_dict() for metric, one in summary.scores.items()},
            "numbers": summary.numbers,
            "subjects": kinds(summary.subjects),
            "levels": kinds(summary.levels),
            "settings": report.settings[name],
        }
        if name in report.measures:
            benchmarks[name]["measures"] = list(report.measures[name])
    return {"version": VERSION, "model": report.model, "mean": report.mean.as_dict(), "benchmarks": benchmarks}


SETTINGS_IN_TABLE = ("temperature", "top_p", "max_tokens", "format", "format_hash", "grader", "engine", "seed")


def _results_csv(report: Report) -> str:
    lines: list[dict[str, Any]] = []
    for name, summary in report.summaries.items():
        own = {key: report.settings[name][key] for key in SETTINGS_IN_TABLE}
        own |= {"format": own["format"]["name"], "k": summary.k}
        scores = [("", metric, summary.n, score) for metric, score in summary.scores.items()]
        scores += [(f"subject {one}", f"avg@{summary.k}", n, score) for one, (n, score) in summary.subjects.items()]
        scores += [(f"level {one}", f"avg@{summary.k}", n, score) for one, (n, score) in summary.levels.items()]
        for part, metric, n, score in scores:
            lines.append({"benchmark": name, "part": part, "metric": metric, **score.as_dict(), "n": n, **own})
        for metric, value in summary.numbers.items():
            lines.append({"benchmark": name, "metric": metric, "value": value, "n": summary.n, **own})
        lines.append({"benchmark": name, "metric": "unknown", "value": summary.unknown, "n": summary.n, **own})
    lines.append({"benchmark": "mean", "metric": "headline", **report.mean.as_dict()})
    return _csv(lines)


def _csv(lines: Sequence[Mapping[str, Any]]) -> str:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


# --- reading ---------------------------------------------------------------------------------------------------


def read_settings(folder: Path) -> dict[str, Any] | None:
    """What the evaluation in this folder measures; None if there is none."""
    path = folder / "settings.json"
    if not path.is_file():
        return None
    try:
        settings = from_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is broken", fix="remove the folder or choose another") from error
    if not isinstance(settings, dict) or settings.get("version") != VERSION:
        raise UserError(f"{path} is not of version {VERSION}", fix="evaluate again in another folder")
    return settings


def is_complete(folder: Path) -> bool:
    return (folder / "results.json").is_file() and (folder / "samples.jsonl").is_file()


def read_report(folder: str | Path) -> Report:
    """A finished evaluation; its numbers are computed from its samples again."""
    folder = Path(folder)
    settings = read_settings(folder)
    if settings is None:
        raise UserError(f"{folder} holds no evaluation", fix="give the folder that `lemma eval` wrote")
    if not is_complete(folder):
        raise UserError(f"the evaluation in {folder} is not complete", fix="give its `lemma eval` command again")
    path = folder / "samples.jsonl"
    rows: dict[str, list[EvalRow]] = {name: [] for name in settings["benchmarks"]}
    lines = read_json_lines(path)
    for number in count(1):
        try:
            values = next(lines, None)
            if values is None:
                break
            row = EvalRow(**values)
            rows[row.benchmark].append(row)
        except (TypeError, KeyError, ValueError) as error:
            fix = "evaluate again in another folder"
            raise UserError(f"this sample cannot be read ({error})", file=path, line=number, fix=fix) from error
    for name, own in rows.items():
        _check_whole(path, name, own, settings["benchmarks"][name])
    return make_report(settings["model"], settings["benchmarks"], rows, _read_measures(folder / "measures.json"))


def _read_measures(path: Path) -> dict[str, dict[str, list[float]]]:
    if not path.is_file():
        return {}
    try:
        measures: dict[str, dict[str, list[float]]] = from_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is broken", fix="evaluate again in another folder") from error
    return measures


def _check_whole(path: Path, name: str, rows: Sequence[EvalRow], settings: Mapping[str, Any]) -> None:
    """A file that lost some of its samples would give numbers over fewer problems."""
    counts = Counter(row.problem for row in rows)
    if len(counts) != settings["n"] or set(counts.values()) != {settings["k"]}:
        raise UserError(
            f"{path} holds {len(rows)} samples of {name}, not {settings['k']} of each of {settings['n']} problems",
            fix="evaluate again in another folder",
        )


def claim(folder: Path, identity: dict[str, Any], *, any_grader: bool = False) -> None:
    """Make the folder that of this evaluation; refuse where it is that of another.

    With `any_grader`, the same samples with the verdicts of another grader are the same evaluation.
    """
    there = read_settings(folder)
    if there is None:
        # A process that was killed while it wrote the settings leaves a hidden file.
        if folder.is_dir() and any(not path.name.startswith(".") for path in folder.iterdir()):
            raise UserError(f"{folder} holds something other than an evaluation", fix="write --to and another folder")
        write_settings(folder, identity)
        return
    was, now = leaves(there), leaves(json.loads(json.dumps(identity)))
    for key in [*now, *was]:
        if any_grader and key.startswith("benchmarks.") and key.endswith(".grader"):
            continue
        if was.get(key) != now.get(key):
            raise UserError(
                f"{folder} holds another evaluation ({key} was {was.get(key)}, is {now.get(key)})",
                fix="write --to and another folder, or remove that one",
            )


def write_settings(folder: Path, identity: dict[str, Any]) -> None:
    write_whole(folder / "settings.json", json.dumps(identity, indent=1, ensure_ascii=False) + "\n")


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Two processes never write to one evaluation, and what a link in it leads to is not written."""
    for path in folder.rglob("*"):
        if leads_out(path, folder):
            raise UserError(f"{path} is a link that leads out of the evaluation", fix="write --to and another folder")
    with open(folder / ".lock", "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(
                f"another process is working in {folder}", fix="wait for it, or write --to and another folder"
            ) from error
        yield
