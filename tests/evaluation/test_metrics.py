"""Metrics against values computed by hand, by enumeration, and by the originals (tests/reference/metrics.json)."""

from __future__ import annotations

import json
import math
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lemma.core.types import Message, Problem
from lemma.evaluation.metrics import Mark, _mean, majority, mean_over_benchmarks, pass_at_k, sizes_up_to, summarise
from lemma.formats import make_format
from lemma.grading import GradingService

CASES = json.loads((Path(__file__).resolve().parents[1] / "reference" / "metrics.json").read_text())["cases"]


def cases(variant: str) -> list[Any]:
    found = [case for case in CASES if case["variant"] == variant]
    return [pytest.param(case, id=case["id"]) for case in found]


def problems(count: int, **more: Any) -> list[Problem]:
    return [Problem((Message("user", f"question {i}"),), ("1",), id=str(i), **more) for i in range(count)]


def close(value: float, wanted: float) -> bool:
    return math.isclose(value, wanted, rel_tol=1e-9, abs_tol=1e-9)


@pytest.mark.parametrize("case", cases("pass_at_k"))
def test_pass_at_k_is_the_originals(case: Any) -> None:
    n = case["inputs"]["n"]
    for right, row in zip(case["inputs"]["c"], case["outputs"]["pass_at_k"], strict=True):
        for k, wanted in zip(case["inputs"]["k"], row, strict=True):
            assert close(pass_at_k(n, right, k), wanted)


@pytest.mark.parametrize("case", cases("pass_at_k:ragged"))
def test_pass_at_k_with_different_numbers_of_samples(case: Any) -> None:
    pairs = zip(case["inputs"]["n"], case["inputs"]["c"], strict=True)
    found = [pass_at_k(n, right, case["params"]["k"]) for n, right in pairs]
    assert all(map(close, found, case["outputs"]["per_problem"]))
    assert close(_mean(found), case["outputs"]["mean"])


@pytest.mark.parametrize("case", cases("pass_at_k:table"))
def test_a_table_of_verdicts_gives_every_pass_at_k(case: Any) -> None:
    marks = [[Mark(bool(right)) for right in row] for row in case["inputs"]["correct"]]
    scores = summarise(problems(len(marks)), marks).scores
    for name, wanted in case["outputs"]["metrics"].items():
        k = int(name.split("_")[2])
        found = scores[f"avg@{len(marks[0])}" if k == 1 else f"pass@{k}"].value
        assert close(found, wanted), name


@pytest.mark.parametrize("case", cases("pass_and_average"))
def test_pass_and_average_of_one_problem(case: Any) -> None:
    scores = case["inputs"]["scores"]
    for size in range(1, len(scores) + 1):
        sums = case["outputs"]["sums"]
        assert close(_mean(scores[:size]), sums[f"pass@1[avg-of-{size}]"]["correct"])
        if set(scores) <= {0, 1}:
            assert close(pass_at_k(len(scores), sum(scores), size), sums[f"pass@{size}"]["correct"])


@pytest.mark.parametrize("case", cases("maj_at_k:ties_averaged"))
def test_majority_with_ties_averaged(case: Any) -> None:
    votes, right = case["inputs"]["answers"], case["inputs"]["correct"]
    for name, wanted in case["outputs"]["sums"].items():
        size = int(name.split("@")[1])
        assert close(majority(votes[:size], right[:size]), wanted["correct"])


@pytest.mark.parametrize("case", cases("maj_at_k:first_wins_ties"))
def test_majority_where_the_first_wins_ties(case: Any) -> None:
    assert close(majority(case["inputs"]["answers"], case["inputs"]["scores"], "first"), case["outputs"]["value"])


@pytest.mark.parametrize("case", cases("bootstrap_best_maj"))
def test_majority_on_thousands_of_resamples(case: Any) -> None:
    """The original draws with numpy's legacy generator, seeded before each number; the same draws, our majority."""
    inputs, seed = case["inputs"], case["params"]["seed"]
    for source, columns in case["outputs"]["metrics"].items():
        rows = [i for i, one in enumerate(inputs["data_sources"]) if one == source]
        votes, scores = ([inputs[name][i] for i in rows] for name in ("answers", "scores"))
        assert close(_mean(scores), columns["score"][f"mean@{len(scores)}"])
        for size in [2**power for power in range(1, 6) if 2**power <= len(scores)]:
            legacy = np.random.RandomState(seed)
            drawn = [legacy.choice(len(scores), size=size, replace=True) for _ in range(case["params"]["resamples"])]
            won = [majority([votes[i] for i in own], [scores[i] for i in own], "first") for own in drawn]
            assert close(float(np.mean(won)), columns["score"][f"maj@{size}/mean"])
            assert close(float(np.std(won)), columns["score"][f"maj@{size}/std"])


@pytest.mark.parametrize("case", cases("eval_mean_of_sources"))
def test_the_mean_over_sources_is_not_the_mean_over_rows(case: Any) -> None:
    marks: dict[str, list[list[Mark]]] = {}
    for row, right in zip(case["inputs"]["rows"], case["outputs"]["correct"], strict=True):
        marks.setdefault(row["data_source"], []).append([Mark(right)])
    summaries = {name: summarise(problems(len(own)), own) for name, own in marks.items()}
    assert {name: pytest.approx(one.accuracy.value) for name, one in summaries.items()} == case["outputs"]["per_source"]
    assert close(
        mean_over_benchmarks([one.accuracy for one in summaries.values()]).value, case["outputs"]["mean_of_sources"]
    )


@pytest.mark.parametrize("case", cases("eval_mean_of_sources"))
def test_thoughts_are_not_graded(case: Any) -> None:
    """Where the original has no defect, a format that opens the thinking gives its verdicts on boxed answers."""
    if case.get("original_bug") or not case["inputs"]["rows"][0]["prompt"].endswith("<think>\n"):
        return
    fmt = make_format("think_boxed")
    with GradingService() as service:
        for row, wanted in zip(case["inputs"]["rows"], case["outputs"]["correct"], strict=True):
            answer = fmt.parse(row["generated"]).answer
            if "boxed" in row["generated"]:
                assert (answer is not None and service.grade(answer, row["gold"]).right) == wanted, row


@pytest.mark.parametrize("case", cases("tag_evaluator"))
def test_the_five_numbers_of_the_tag_evaluator(case: Any) -> None:
    """Its format wants the start tag, which our prompt emits, and takes an empty solution for well formed.

    Its answers count by substring, ours by the grader: they are compared where that makes no difference.
    """
    fmt, start = make_format("working_out"), "<start_working_out>"
    marks, inputs = [], case["inputs"]
    rewards = inputs["rewards"] or [None] * len(inputs["outputs"])
    with GradingService() as service:
        for text, gold, reward in zip(inputs["outputs"], inputs["golds"], rewards, strict=True):
            parsed = fmt.parse(text)
            right = parsed.answer is not None and service.grade(parsed.answer, gold).right
            formatted = text.startswith(start) and {*parsed.faults} <= {"no_answer"}
            reasoning = len(parsed.reasoning or "") if text.startswith(start) else None
            marks.append([Mark(right, formatted=formatted, reasoning=reasoning, reward=reward)])
    found, wanted = summarise(problems(len(marks)), marks), case["outputs"]["metrics"]
    if not case.get("original_bug"):
        assert close(100 * found.accuracy.value, wanted["eval/answer_accuracy"])
    assert close(100 * found.scores["format"].value, wanted["eval/format_accuracy"])
    assert close(100 * found.scores["reasoning"].value, wanted["eval/reasoning_present"])
    assert close(found.numbers["reasoning_length"], wanted["eval/avg_reasoning_length"])
    assert close(found.numbers.get("reward", 0.0), wanted["eval/avg_total_reward"])
    assert ("reward" in found.numbers) == (inputs["rewards"] is not None)


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_pass_at_k_by_enumeration(n: int) -> None:
    for right in range(n + 1):
        for k in range(1, n + 1):
            subsets = list(combinations(range(n), k))
            wanted = sum(any(place < right for place in subset) for subset in subsets) / len(subsets)
            assert close(pass_at_k(n, right, k), wanted)


def test_sizes() -> None:
    assert [sizes_up_to(k) for k in (1, 2, 3, 8, 12)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 12]]


def test_all_numbers_of_a_small_benchmark_by_hand() -> None:
    asked = [
        Problem((Message("user", "a"),), ("1",), subject="Algebra", level="2"),
        Problem((Message("user", "b"),), ("1",), subject="Algebra", level="10"),
        Problem((Message("user", "c"),), ("1",), level="2"),
    ]
    good = Mark(True, vote="1", formatted=True, reasoning=10, tokens=20, reward=2.0)
    cut = Mark(False, truncated=True, reasoning=30, tokens=60)
    other = Mark(False, vote="7", formatted=True, reasoning=0, tokens=10, reward=1.0)
    odd = Mark(False, known=False, vote="?", formatted=True, reasoning=None, tokens=10)
    found = summarise(asked, [[good, good, cut, other], [odd, odd, odd, good], [other, good, cut, cut]])
    value = {name: score.value for name, score in found.scores.items()}
    assert (found.n, found.k, found.unknown) == (3, 4, 3)
    assert close(value["avg@4"], (0.5 + 0.25 + 0.25) / 3)
    assert close(value["pass@4"], 1.0) and close(value["pass@2"], (5 / 6 + 0.5 + 0.5) / 3)
    assert close(value["maj@4"], (1 + 0 + 0.5) / 3)
    assert close(value["maj@2"], (1 + 0 + 0.5) / 3)
    assert close(value["format"], (0.75 + 1.0 + 0.5) / 3)
    assert close(value["truncated"], (0.25 + 0 + 0.5) / 3)
    assert close(value["reasoning"], (0.75 + 0.25 + 0.75) / 3)
    assert close(found.numbers["reasoning_length"], (10 + 10 + 30 + 0 + 10 + 0 + 10 + 30 + 30) / 12)
    assert close(found.numbers["reasoning_length/right"], 10) and close(found.numbers["tokens/right"], 20)
    assert close(found.numbers["tokens/wrong"], (60 + 10 + 30 + 10 + 60 + 60) / 8)
    assert close(found.numbers["reward"], (4 * 2 + 2 * 1) / 6)
    assert {name: (n, score.value) for name, (n, score) in found.subjects.items()} == {"Algebra": (2, 0.375)}
    assert list(found.levels) == ["2", "10"] and found.levels["2"][0] == 2
    assert found.accuracy.low <= found.accuracy.value <= found.accuracy.high


def test_nothing_right_is_zero_with_an_upper_end() -> None:
    found = summarise(problems(30), [[Mark(False)] * 4] * 30)
    assert found.accuracy[:2] == (0.0, 0.0) and 0.1 < found.accuracy.high < 0.13
    assert "tokens/right" not in found.numbers and "reward" not in found.numbers
