"""Graders of other systems on saved samples: several gold answers, graders that fail, rewards, unfinished thoughts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lemma.evaluation.prepare import _fitted
from lemma.evaluation.rescore import regrade
from lemma.evaluation.results import Row
from lemma.formats import FORMATS, make_format
from lemma.grading import GradingService
from lemma.grading.compat import COMPAT

SETTINGS = {"format": {"name": "boxed"}, "rules": {}}


@pytest.fixture(scope="module")
def service() -> Iterator[GradingService]:
    with GradingService() as service:
        yield service


def row(completion: str, gold: list[str], verdict: str = "wrong") -> Row:
    return Row(
        benchmark="made", problem="p", sample=0, question="q", prompt="q", completion=completion, extracted=None,
        gold=gold, verdict=verdict, reason="", format_ok=False, faults=[], finish="stop", tokens=9, reasoning=None,
        reward=0.5,
    )  # fmt: skip


SAYS_SEVEN = r"I think so.</think> The answer is $\boxed{7}$"


@pytest.mark.parametrize("name", ["luffy_v0", "luffy_v3", "luffy_v4", "verifier_math", "boxed_slow", "math_source"])
def test_any_of_several_golds_counts(name: str, service: GradingService) -> None:
    rows = [row(SAYS_SEVEN, ["5", "7"]), row(SAYS_SEVEN, ["5", "6"]), row(SAYS_SEVEN, ["7"]), row(SAYS_SEVEN, [])]
    found = regrade(rows, SETTINGS, name, service)
    assert [(one.verdict, one.reason) for one in found] == [
        ("right", name), ("wrong", name), ("right", name), ("unknown", "no_gold"),
    ]  # fmt: skip


def test_every_grader_takes_several_golds(service: GradingService) -> None:
    for name in COMPAT:
        (found,) = regrade([row(SAYS_SEVEN, ["5", "7"])], SETTINGS, name, service)
        assert found.verdict in ("right", "wrong") and found.reason == name, name


def test_a_grader_that_fails_says_nothing_about_the_others(service: GradingService) -> None:
    """This one takes the largest of the labels in a list, and a gold that is an empty list leaves none."""
    said = r"<finish>7</finish> \boxed{7}"
    rows = [row(said, ["[]"]), row(said, ["7"]), row(said, ["[]", "7"])]
    found = regrade(rows, SETTINGS, "verifier_re_search_f1", service)
    assert [one.verdict for one in found] == ["unknown", "right", "right"]
    assert found[0].reason == "verifier_re_search_f1 failed"


def test_rewards_stay_only_with_the_verdicts_that_they_came_from(service: GradingService) -> None:
    same, changed = row(SAYS_SEVEN, ["7"], "right"), row(SAYS_SEVEN, ["7"], "wrong")
    assert [one.reward for one in regrade([same, same], SETTINGS, "lemma", service)] == [0.5, 0.5]
    assert [one.reward for one in regrade([same, changed], SETTINGS, "lemma", service)] == [None, None]
    assert [one.reward for one in regrade([same, same], SETTINGS, "luffy_v4", service)] == [None, None]


NO_THOUGHTS = {"question_only", "alpaca", "prime_code"}
"""Formats that read the whole text whatever tags stand in it."""


@pytest.mark.parametrize("name", sorted({*FORMATS} - NO_THOUGHTS))
def test_an_answer_in_thoughts_that_never_end_is_found_on_request(name: str, service: GradingService) -> None:
    """The text opens thoughts, never closes them, and says 7 in the way of each format."""
    tags = {"working_out": ("<start_working_out>", "<SOLUTION>7</SOLUTION>"), "xml": ("<reasoning>", None)}
    opening, answer = tags.get(name, ("<think>", None))
    text = f"{opening} so {answer or chr(92) + 'boxed{7} <answer>7</answer>'}"
    found = {}
    for thinking in ("after", "whole"):
        fmt = _fitted(make_format(name), "Q:", thinking)
        settings = {"format": fmt.model_dump(mode="json"), "rules": {}}
        (found[thinking],) = regrade([row(text, ["7"])], settings, "lemma", service)
    assert (found["after"].verdict, found["after"].reason, found["after"].extracted) == ("wrong", "no_answer", None)
    assert (found["whole"].verdict, found["whole"].extracted) == ("right", "7")


def test_math_verify_wants_no_tags(service: GradingService) -> None:
    rows = [
        row(text, ["1/2"]) for text in (r"So $\boxed{\frac{1}{2}}$", "It is 0.5", "It is 5", r"x</think> $\frac12$")
    ]
    verdicts = {
        name: [one.verdict for one in regrade(rows, SETTINGS, name, service)] for name in ("math_verify", "luffy_v3")
    }
    assert verdicts["math_verify"] == ["right", "right", "wrong", "right"]
    assert verdicts["luffy_v3"] == ["wrong", "wrong", "wrong", "right"]
