"""Targets: verbatim where the response already has the format, put into tags where it has not."""

from __future__ import annotations

import pytest

from lemma.core.errors import UserError
from lemma.core.types import Demonstration, Message, Problem
from lemma.formats import FORMATS, make_format

PROBLEM = Problem((Message("user", "What is 2 + 2?"),), id="row-7")
THOUGHT = "<think>\nTwo and two.\n</think>\nIt is \\boxed{4}."


def target(name: str, **parts: str) -> str:
    return make_format(name).target(Demonstration(PROBLEM, **parts))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("r1_zero", " two </think> <answer> 4 </answer>"),
        ("question_only", "two\n\n\\boxed{4}"),
        ("xml", "<reasoning>\ntwo\n</reasoning>\n<answer>\n4\n</answer>\n"),
        ("working_out", "two<end_working_out><SOLUTION>4</SOLUTION>"),
        ("boxed", "two\n\n\\boxed{4}"),
        ("think_boxed", "two\n</think>\n\n\\boxed{4}"),
        ("think_answer", "<think> two </think> <answer> 4 </answer>"),
        ("alpaca", "two\n\nThe answer is: 4"),
    ],
)
def test_reasoning_and_answer_are_put_into_the_tags(name: str, expected: str) -> None:
    assert target(name, reasoning=" two\n", answer=" 4 ") == expected
    assert target(name, reasoning="<think>two</think>", answer="4") == expected


@pytest.mark.parametrize("name", FORMATS)
def test_a_response_alone_is_kept_word_for_word(name: str) -> None:
    assert target(name, response=" anything {at} all ") == " anything {at} all "


@pytest.mark.parametrize(
    ("name", "response", "expected"),
    [
        ("r1_zero", "<think> a </think> <answer> 4 </answer>", " a </think> <answer> 4 </answer>"),
        ("think_boxed", THOUGHT, "Two and two.\n</think>\nIt is \\boxed{4}."),
        ("working_out", "<start_working_out>a<end_working_out>", "a<end_working_out>"),
        ("xml", "<reasoning>a</reasoning>", "<reasoning>a</reasoning>"),
    ],
)
def test_the_opening_tag_is_not_repeated(name: str, response: str, expected: str) -> None:
    assert target(name, response=response) == expected


def test_a_verbatim_prompt_decides_whether_the_opening_tag_stays() -> None:
    assert target("think_boxed", response=THOUGHT, prompt="Q: 2 + 2?\nA: ") == THOUGHT
    assert target("think_boxed", response=THOUGHT, prompt="Q <think>\n") == THOUGHT.removeprefix("<think>\n")


def test_a_response_in_another_format_is_taken_apart_when_the_answer_is_known() -> None:
    assert target("think_boxed", response=THOUGHT, answer="4") == THOUGHT.removeprefix("<think>\n")
    assert target("working_out", response=THOUGHT, answer="4") == (
        "Two and two.\n\nIt is \\boxed{4}.<end_working_out><SOLUTION>4</SOLUTION>"
    )
    assert target("xml", response=THOUGHT, reasoning="two", answer="4") == (
        "<reasoning>\ntwo\n</reasoning>\n<answer>\n4\n</answer>\n"
    )


def test_an_answer_that_is_already_boxed_is_not_boxed_again() -> None:
    assert target("boxed", reasoning="so \\boxed{4}.", answer="4") == "so \\boxed{4}."
    assert target("boxed", reasoning="not \\boxed{3}", answer="4") == "not \\boxed{3}\n\n\\boxed{4}"


@pytest.mark.parametrize("parts", [{}, {"reasoning": "two"}, {"answer": "  "}])
def test_a_demonstration_of_nothing_is_named(parts: dict[str, str]) -> None:
    with pytest.raises(UserError, match="problem row-7 has neither a response nor an answer; give the row"):
        target("r1_zero", **parts)
