"""The files of an evaluation: what the mean is a mean of, and that the table for spreadsheets lacks nothing."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from lemma.evaluation.during_training import flat_metrics
from lemma.evaluation.eval_row import EvalRow, lines_of
from lemma.evaluation.results import Report, as_json, make_report, write_report
from lemma.evaluation.tables import as_markdown
from tests.core.disk_calls import disk_calls


def rows(benchmark: str, verdicts: list[list[str]]) -> list[EvalRow]:
    return [
        EvalRow(
            benchmark, f"p{n}", k, "q", "q", "c", "7", ["7"], verdict, "number", True, [], "stop", 9, None,
            reward=1.0, subject="Algebra", level="2",
        )
        for n, own in enumerate(verdicts)
        for k, verdict in enumerate(own)
    ]  # fmt: skip


@pytest.fixture
def report() -> Report:
    """Two problems each: pass@2 of the first is 1 (accuracy 1/2), accuracy of the second is 1/2 (one unknown)."""
    settings: dict[str, Any] = {
        "n": 2, "k": 2, "ties": "average", "seed": 0, "temperature": 0.6, "top_p": 1.0, "max_tokens": 9,
        "format": {"name": "boxed"}, "format_hash": "f", "grader": "1", "engine": "native",
    }  # fmt: skip
    samples = {
        "one": rows("one", [["right", "wrong"], ["wrong", "right"]]),
        "two": rows("two", [["right"], ["unknown"]]),
    }
    both = {"one": settings | {"metric": "pass"}, "two": settings | {"metric": "avg", "k": 1}}
    return make_report({"name": "m"}, both, samples)


def test_the_mean_is_that_of_the_numbers_in_the_table(report: Report) -> None:
    assert [report.headline(name)[0] for name in ("one", "two")] == ["pass@2", "avg@1"]
    assert report.mean.value == 0.75 and as_json(report)["mean"]["value"] == 0.75
    assert "| one | pass@2 | 100.0 |" in as_markdown(report) and "| mean |  | 75.0 |" in as_markdown(report)
    stage = flat_metrics(report)
    assert stage["answer_accuracy"] == 0.5 and stage["answer_accuracy_low"] <= 0.5 <= stage["answer_accuracy_high"]


def test_the_spreadsheet_has_every_number(report: Report, tmp_path: Path) -> None:
    write_report(tmp_path, report)
    lines = list(csv.DictReader(io.StringIO((tmp_path / "results.csv").read_text())))
    found = {(line["benchmark"], line["part"], line["metric"]): float(line["value"]) for line in lines}
    assert len(found) == len(lines)
    whole = json.loads((tmp_path / "results.json").read_text())
    wanted = {("mean", "", "headline"): whole["mean"]["value"]}
    for name, own in whole["benchmarks"].items():
        wanted |= {(name, "", metric): score["value"] for metric, score in own["scores"].items()}
        wanted |= {(name, "", metric): value for metric, value in own["numbers"].items()}
        wanted[name, "", "unknown"] = own["unknown"]
        for kind, groups in (("subject", own["subjects"]), ("level", own["levels"])):
            wanted |= {(name, f"{kind} {one}", f"avg@{own['k']}"): score["value"] for one, score in groups.items()}
    assert found == wanted and found["two", "", "unknown"] == 1


def test_results_json_says_that_all_other_files_are_on_the_disk(report: Report, tmp_path: Path) -> None:
    with disk_calls(tmp_path) as calls:
        write_report(tmp_path, report, {"seconds": 1.0})
    others = ["samples.jsonl", "questions.csv", "results.csv", "results.md", "metadata.json"]
    synced, named = calls[:6], calls[6:]
    assert sorted(synced) == sorted(f"sync {name}" for name in [*others, "results.json"])
    assert named == [*(f"name {name}" for name in others), "sync folder", "name results.json", "sync folder"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*others, "results.json"])


def test_a_line_encoded_in_advance_is_the_same_line(report: Report, tmp_path: Path) -> None:
    whole = [row for own in report.rows.values() for row in own]
    whole[0].completion, whole[1].turns = 'so "π"\n', [{"said": "a", "heard": "b", "tokens": 1}]
    write_report(tmp_path / "late", report)
    for row in whole:
        row.lines = lines_of(row)
    write_report(tmp_path / "early", report)
    for name in ("samples.jsonl", "questions.csv"):
        assert (tmp_path / "early" / name).read_bytes() == (tmp_path / "late" / name).read_bytes()
    early = (tmp_path / "early" / "samples.jsonl").read_bytes()
    assert [EvalRow(**json.loads(line)) for line in early.splitlines()] == whole


def test_a_row_with_another_verdict_has_another_line(report: Report, tmp_path: Path) -> None:
    row = report.rows["one"][0]
    row.lines = lines_of(row)
    row.lenient = "right"  # may come after the start of the line
    report.rows["one"][0] = replace(row, verdict="wrong")
    write_report(tmp_path, report)
    assert EvalRow(**json.loads((tmp_path / "samples.jsonl").read_text().splitlines()[0])) == report.rows["one"][0]
    assert next(csv.DictReader(io.StringIO((tmp_path / "questions.csv").read_text())))["is_correct"] == "False"


def test_both_files_of_samples_are_what_json_and_csv_write(report: Report, tmp_path: Path) -> None:
    whole = [row for own in report.rows.values() for row in own]
    whole[0].extracted, whole[0].question, whole[0].gold = None, 'a "b",\nc', ["1", "2"]
    whole[1].lenient, whole[1].normalised, whole[2].options = "wrong", False, [-1.0, -2.5]
    write_report(tmp_path, report)
    values = [{one.name: getattr(row, one.name) for one in fields(row) if one.init} for row in whole]
    for own in values:
        for name in ("options", "normalised", "turns"):
            if own[name] is None:
                del own[name]
    lines = [json.dumps(own, ensure_ascii=False) + "\n" for own in values]
    assert (tmp_path / "samples.jsonl").read_text() == "".join(lines)
    text = io.StringIO(newline="")
    names = ["benchmark", "problem", "sample", "question", "target", "prediction", "is_correct", "reason"]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    for row in whole:
        asked = [row.benchmark, row.problem, row.sample, row.question, " | ".join(row.gold)]
        writer.writerow([*asked, row.extracted, row.verdict == "right", row.reason])
    assert (tmp_path / "questions.csv").read_bytes() == text.getvalue().encode()


@pytest.mark.parametrize("said", [None, "", " ", "$", "\\text{}"])
def test_an_answer_that_says_nothing_does_not_vote(said: str | None) -> None:
    (empty,) = rows("one", [["wrong"]])
    empty.extracted = said
    assert empty.mark.vote is None
    empty.extracted = "8"
    assert empty.mark.vote == "not 8"
