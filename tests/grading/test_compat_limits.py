"""Graders of other systems run in workers only; whose text overruns decides; Python's reader sees only arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from lemma.grading import GradingService
from lemma.grading.compat import COMPAT
from lemma.grading.compat.math_verify_calls import verified
from lemma.grading.tasks import PROBE

BRACES = "{" * 10_000 + "5" + "}" * 10_000
BOMB = r"\prod_{k=1}^{19999} (k^2+1)"
HEAVY = [name for name in COMPAT if name.startswith(("r1_", "question", "boxed", "luffy", "math_", "verifier_math"))]


@pytest.fixture(scope="module")
def service() -> Iterator[GradingService]:
    with GradingService(cpu_seconds=0.5) as service:
        yield service


def reward(score: Any) -> float:
    return float(score["reward"] if isinstance(score, dict) else score[1] if isinstance(score, list | tuple) else score)


@pytest.mark.parametrize("name", [*HEAVY, "verifier_strict_math"])
def test_the_probe_makes_every_grader_look_at_the_gold(name: str) -> None:
    assert reward(COMPAT[name](PROBE, "987654321")) == 1.0
    assert reward(COMPAT[name](PROBE, "987654320")) <= 0.0


def test_a_gold_that_overruns_has_no_score_and_never_runs_in_the_caller(
    service: GradingService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def here(*arguments: Any, **options: Any) -> float:
        raise AssertionError("a grader ran in the caller")

    monkeypatch.setitem(COMPAT, "luffy_v3", here)
    assert service.compat("luffy_v3", r"so </think> \boxed{5}", BRACES) is None


def test_a_response_that_overruns_scores_as_an_empty_one(
    service: GradingService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(COMPAT, "luffy_v1", None)
    monkeypatch.setitem(COMPAT, "luffy_v3", None)
    assert service.compat("luffy_v3", rf"so </think> \boxed{{{BOMB}}}", "5") == 0.0
    assert service.compat("luffy_v3", r"so </think> \boxed{5}", "5") == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "9**9**9",
        "9^9^9^9",
        "2**99999999",
        "(1+" * 60 + "1" + ")" * 60,
        "1+" * 3_000 + "1",
        "٣+٣",
        "1\x1c+1",
        "9" * 300 + "+1",
    ],
)
def test_only_small_plain_arithmetic_gets_to_the_reader_of_python(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr("math_verify.parser.parse_expr_cached", lambda text: seen.append(text))
    verified("$5$", f"the answer is {text}")
    verified("$5$", f"we get {text} .", boxed_first=True)
    assert not any(set(text) & set("*^٣\x1c") or len(text) > 300 for text in seen), seen
    verified("$5$", "the answer is 2+3*7")
    assert seen[-1] == "2+3*7", "ordinary arithmetic does"
