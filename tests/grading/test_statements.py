"""What a completion states is what is graded; no other number of the text is."""

from __future__ import annotations

import re

import pytest

from lemma.grading import extract, grade
from tests.grading.prose_cases import PROSE
from tests.grading.statements_cases import STATED

CASES = [(text, answer) for cases in STATED.values() for text, answer in cases]


@pytest.mark.parametrize(("text", "answer"), CASES)
def test_what_is_stated_is_right(text: str, answer: str | None) -> None:
    if answer is not None:
        assert grade(text, answer).kind == "right", extract(text)


@pytest.mark.parametrize(("text", "answer"), CASES)
def test_no_other_number_of_the_text_is_right(text: str, answer: str | None) -> None:
    others = {number for number in re.findall(r"\d+", text) if answer is None or grade(number, answer).kind != "right"}
    assert [number for number in others if grade(text, number).kind == "right"] == []


@pytest.mark.parametrize("name", PROSE)
def test_prose_gives_these_golds_and_not_those(name: str) -> None:
    for text, given, others in PROSE[name]:
        assert [gold for gold in (*given, *others) if grade(text, gold).kind == "right"] == list(given), extract(text)
