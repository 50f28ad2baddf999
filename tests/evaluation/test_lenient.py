"""Base models that answer well and keep no format: both are to be seen."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lemma.evaluation.evaluator import EvalSettings, evaluate
from lemma.evaluation.lenient import hints
from lemma.evaluation.rescore import rescore
from lemma.evaluation.results import Report
from lemma.evaluation.tables import as_markdown
from lemma.grading import GradingService
from lemma.models.load_model import load_policy
from lemma.models.policy import Policy
from tests.rollouts.scripted import Scripted

ROWS = [("1 + 1 ?", "2"), ("2 + 2 ?", "4"), ("3 + 3 ?", "6"), ("4 + 4 ?", "8")]
SAID = ["1 + 1 = 2", "2 + 2 = 5", "3 + 3 = 5 </think> <answer> 5 </answer>", "</think> <answer> 8 </answer>"]


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy("tiny", "cpu")


def measured(policy: Policy, said: list[str], folder: Path, rows: Sequence[tuple[str, str]] = ROWS) -> Report:
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"question": question, "answer": answer}) + "\n" for question, answer in rows]
    (folder / "rows.jsonl").write_text("".join(lines))
    engine = Scripted(policy.tokenizer, lambda request, sample: said[int(request.key[3])])
    settings = EvalSettings(max_tokens=40, format={"name": "r1_zero", "preamble": False})
    return evaluate(engine, policy, [str(folder / "rows.jsonl")], settings, folder / "out")


def test_an_answer_outside_the_format_counts_leniently_and_one_inside_as_always(policy: Policy, tmp_path: Path) -> None:
    report = measured(policy, SAID, tmp_path)
    rows = report.rows["rows"]
    assert [row.verdict for row in rows] == ["wrong", "wrong", "wrong", "right"]
    assert [row.lenient for row in rows] == ["right", "wrong", "wrong", "right"]
    scores = report.summaries["rows"].scores
    assert (scores["avg@1"].value, scores["lenient"].value, scores["format"].value) == (0.25, 0.5, 0.5)
    header, _, line = as_markdown(report).splitlines()[:3]
    assert dict(zip(header.split(" | "), line.split(" | "), strict=True))["lenient %"] == "50.0"
    assert not hints(report), "half of the completions keep the format"


def test_a_lenient_verdict_is_asked_for_once(policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    submit = GradingService.submit

    def counted(service: GradingService, prediction: str, *others: Any) -> Any:
        asked.append(prediction)
        return submit(service, prediction, *others)

    monkeypatch.setattr(GradingService, "submit", counted)
    report = measured(policy, SAID, tmp_path)
    whole = [row.completion for row in report.rows["rows"] if row.extracted is None]
    assert len(whole) == 2 and [asked.count(text) for text in whole] == [1, 1]


def test_a_hint_where_the_format_is_hardly_ever_kept(policy: Policy, tmp_path: Path) -> None:
    report = measured(policy, ["1 + 1 = 2", "2 + 2 = 4", "3 + 3 = 6", "8 8 9"], tmp_path)
    assert report.summaries["rows"].accuracy.value == 0
    (sentence,) = hints(report)
    assert "0% of the completions keep the format r1_zero" in sentence and "75.0%" in sentence


def test_a_hint_where_the_format_costs_more_than_noise(policy: Policy, tmp_path: Path) -> None:
    rows = [(f"{n} + 1 ?", str(n + 1)) for n in range(20)]
    in_form = [f"</think> <answer> {n + 1} </answer>" for n in range(20)]
    few, many = ([f"{n} + 1 = {n + 1}" for n in range(count)] + in_form[count:] for count in (2, 16))
    assert not hints(measured(policy, few, tmp_path / "few", rows))
    (sentence,) = hints(measured(policy, many, tmp_path / "many", rows))
    assert sentence == (
        "rows: the accuracy is 20.0% with answers where the format r1_zero has them, and 100.0% with answers found "
        "anywhere (lenient)"
    )


def test_a_hint_where_completions_are_cut_off(policy: Policy, tmp_path: Path) -> None:
    report = measured(policy, ["1 + 1 = " * 20] * 3 + ["8 8 9"], tmp_path)
    (sentence,) = hints(report)
    assert "75% of the completions are cut off after 40 tokens" in sentence and sentence.endswith("raise --max-tokens")


def test_grading_again_finds_the_same(policy: Policy, tmp_path: Path) -> None:
    report = measured(policy, SAID, tmp_path)
    with GradingService() as service:
        _, after, _ = rescore(tmp_path / "out", "lemma", service=service)
    assert after.rows == report.rows
