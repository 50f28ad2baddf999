"""The table and the figure of benchmarks/learning_curve.py, from rows as a run writes them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import learning_curve
from tests.reports.made_runs import small_run


def evaluation(step: int, accuracy: float) -> dict[str, object]:
    scores = {
        "answer_accuracy": accuracy,
        "answer_accuracy_low": accuracy - 0.1,
        "answer_accuracy_high": accuracy + 0.1,
    }
    own = {f"evaluation/held_out/{name}": value for name, value in (scores | {"tokens": 40.0}).items()}
    return {"stage": "rl", "step": step, "axis": "eval", "timings": {}, **own}


def test_minutes_count_what_was_trained_before(tmp_path: Path) -> None:
    rows = [
        {"stage": "sft", "step": 10, "axis": "train", "timings": {"seconds": 60.0}},
        evaluation(0, 0.25),
        {
            "stage": "rl",
            "step": 1,
            "axis": "train",
            "right": 0.5,
            "timings": {"seconds": 50.0, "checkpoint_seconds": 10.0, "evaluate_seconds": 10.0},
        },
        evaluation(1, 0.75),
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    points, sampled = learning_curve.read(tmp_path, "rl")
    assert [(point.step, point.minutes, point.accuracy) for point in points] == [(0, 1.0, 0.25), (1, 1.5, 0.75)]
    assert sampled == [(1, 0.5)]
    assert "| 1 | 1.50 | 75.0% | 65.0% to 85.0% | 40 |" in learning_curve.table(points)
    drawn = ElementTree.fromstring(learning_curve.figure(points, sampled, "a title"))
    circles = [float(one.get("cy", "nan")) for one in drawn.iter() if one.tag.endswith("circle")]
    assert len(circles) == 2 and circles[1] < circles[0], "more right answers stand higher"


def test_it_ends_with_the_report_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = small_run(tmp_path / "curve-run", steps=2)
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps(evaluation(2, 0.5) | {"stage": "grpo"}) + "\n")
    monkeypatch.setattr(sys, "argv", ["learning_curve", str(run), "grpo", str(tmp_path / "curve")])
    learning_curve.main()
    assert {path.suffix for path in tmp_path.glob("curve.*")} == {".svg", ".csv", ".html"}
    assert "curve-run" in (tmp_path / "curve.html").read_text()
