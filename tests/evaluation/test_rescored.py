"""Saved public rollouts graded again: how often Lemma's grader and the publishers' own agree."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator

import pytest

from lemma.grading import GradingService
from tests.shared import shared

pytestmark = pytest.mark.realdata


def rescored(name: str, column: str) -> Iterator[tuple[str, int, bool, bool]]:
    """Row, sample, the publisher's verdict, and Lemma's."""
    with gzip.open(shared("data", "rollouts", name), "rt", encoding="utf-8") as handle, GradingService() as service:
        for row in map(json.loads, handle):
            for place, (response, label) in enumerate(zip(row["responses"], row[column], strict=True)):
                yield row["id"], place, bool(label), service.grade(response, row["answer"]).right


def test_gsm8k_solutions_agree_with_is_correct() -> None:
    pairs = [(label, mine) for _, _, label, mine in rescored("gsm8k_gpt3_x4.jsonl.gz", "is_correct")]
    assert len(pairs) == 4864
    assert 1000 < sum(label for label, _ in pairs) < 3000, "both verdicts occur"
    assert sum(label == mine for label, mine in pairs) / len(pairs) >= 0.995


def test_qwen_disagreements_are_the_judged_ones() -> None:
    """docs/results/rescored-rollouts.md lists all nine and says who is right."""
    found = list(rescored("qwen25math_x8.jsonl.gz", "score"))
    assert len(found) == 648
    disagreements = {(row, place): mine for row, place, label, mine in found if label != mine}
    judged = {("rollouts_qwen25math_x8/3", place): True for place in range(8)}
    judged["rollouts_qwen25math_x8/72", 7] = True
    assert disagreements == judged
