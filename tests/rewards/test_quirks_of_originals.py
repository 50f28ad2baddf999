"""What the originals do where the stored rows do not show it, with numbers by hand."""

from __future__ import annotations

import pytest

from lemma.core.types import Message, Problem
from lemma.grading.compat import boxed_grader, luffy_rewards, verifiers
from lemma.grading.compat.strings import hendrycks_box
from lemma.rewards import RewardInput, make_reward


@pytest.mark.parametrize(("tokens", "wanted"), [(100, 1.0), (8292, 0.0), (8292 + 4096, -0.5), (16484, -1.0)])
def test_the_length_verifier_goes_below_zero(tokens: int, wanted: float) -> None:
    problem = Problem((Message("user", "?"),), ("100",))
    assert make_reward("length").score(RewardInput("", problem, ids=range(tokens))) == wanted


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"so $\boxed 7$ it is", "7"),
        (r"\boxed{6}, or rather \boxed 7", "7"),
        (r"\boxed 7$, and then \boxed{6}", "7"),
        (r"\boxed{7}", "7"),
        (r"\boxed {7}", "{7}"),
        (r"\boxed7", None),
        ("7", None),
    ],
)
def test_a_box_without_braces(text: str, inside: str | None) -> None:
    assert hendrycks_box(text) == inside


def test_it_counts_where_the_originals_count_it() -> None:
    assert verifiers.math(r"Thus $\boxed 7$.", "7") == 1.0
    assert verifiers.math(r"Thus $\boxed 8$.", "7") == 0.0
    assert luffy_rewards.math_source(r"Thus $\boxed 7$", "7") == 1.0
    assert luffy_rewards.math_source(r"Thus $\boxed 7 units$", "7") == 0.0
    assert boxed_grader.question_only(r"Thus $\boxed 7$", "7")["format_reward"] == 0.0


@pytest.mark.parametrize(
    ("answer", "gold", "right"), [("i^2", "-1", False), ("2i+3i", "5i", True), ("e+e", "2e", True)]
)
def test_i_is_a_letter_for_the_r1_zero_graders(answer: str, gold: str, right: bool) -> None:
    response = f"x </think> <answer> {answer} </answer>"
    assert boxed_grader.r1_zero(response, gold)["answer_reward"] == float(right)
