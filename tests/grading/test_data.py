"""The labelled cases, and every gold answer of the shared data against itself."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest

from lemma.grading import GradingService, grade
from tests.shared import shared


def rows(path: Path) -> Iterator[dict[str, Any]]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as handle:
        for line in handle:
            yield json.loads(line)


def test_labelled_cases() -> None:
    """At least 99% right, at most two wrong answers taken for right, none over five seconds."""
    cases = list(rows(shared("data", "grader", "dev.jsonl")))
    mistakes, slowest = [], 0.0
    for case in cases:
        start = perf_counter()
        verdict = grade(case["prediction"], case["gold"])
        slowest = max(slowest, perf_counter() - start)
        if verdict.right != case["match"]:
            mistakes.append((case["id"], verdict))
    assert len(mistakes) <= 0.01 * len(cases), mistakes
    assert sum(verdict.right for _, verdict in mistakes) <= 2, mistakes
    assert slowest < 5


FOLDERS = ["gsm8k", "math", "rollouts", "traces", "."]


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_gold_is_right_against_itself(folder: str) -> None:
    golds: set[str] = set()
    for path in sorted(shared("data", folder).glob("*.jsonl*")):
        for row in rows(path):
            golds |= {row[name] for name in ("answer", "expected_answer") if isinstance(row.get(name), str)}
    pairs = [(text, gold) for gold in sorted(golds) for text in (gold, f"So we have\n$\\boxed{{{gold}}}$.")]
    assert len(pairs) > 50
    with GradingService() as service:
        wrong = [pair for pair, verdict in zip(pairs, service.grade_many(pairs), strict=True) if not verdict.right]
    assert not wrong


def test_agrees_with_published_labels_of_rollouts() -> None:
    """GPT-3 solutions of GSM8K carry their own labels; all 4,864 agree."""
    found = 0
    for row in rows(shared("data", "rollouts", "gsm8k_gpt3_x4.jsonl.gz")):
        for response, correct in zip(row["responses"], row["is_correct"], strict=True):
            assert grade(response, row["answer"]).right == bool(correct), (response[-80:], row["answer"])
            found += 1
    assert found == 4864
