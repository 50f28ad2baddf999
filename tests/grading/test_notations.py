"""Unusual notations, formulas that differ in case or braces only, and golds that cannot be read."""

from __future__ import annotations

from time import process_time

import pytest

from lemma.grading import grade
from lemma.grading.symbolic import grade_here
from tests.grading.notations import NOTATIONS, UNREADABLE


@pytest.mark.parametrize("name", NOTATIONS)
def test_notation(name: str) -> None:
    failed = []
    for gold, rights, wrongs in NOTATIONS[name]:
        for kind, answers in (("right", rights), ("wrong", wrongs)):
            for answer in answers:
                verdict = grade(f"\\boxed{{{answer}}}", gold)
                if verdict.kind != kind:
                    failed.append((gold, answer, verdict[:2]))
    assert not failed


@pytest.mark.parametrize("gold", UNREADABLE)
def test_a_gold_that_cannot_be_read_is_unknown(gold: str) -> None:
    for prediction in (r"\boxed{7}", "I do not know.", r"\boxed{\frac12}"):
        verdict = grade(prediction, gold)
        if verdict.reason != "no_answer":
            assert verdict[:2] in (("unknown", "gold_unreadable"), ("unknown", "no_gold"))


def test_a_formula_equals_itself_where_no_parser_reads_it() -> None:
    assert grade(r"\boxed{P(A \mid B)}", "P(A|B)")[:2] == ("right", "exact")
    assert grade(r"\boxed{P(B|A)}", "P(A|B)").kind == "wrong"


def test_any_of_several_golds_counts() -> None:
    assert grade(r"\boxed{7}", ["5", "7"]).right and grade(r"\boxed{7}", ("7",)).right
    assert grade(r"\boxed{7}", ["5", "???"]).kind == "wrong"
    assert grade(r"\boxed{7}", ["???"]).reason == "gold_unreadable" and grade("7", []).reason == "no_gold"


@pytest.mark.parametrize(("gold", "kind"), [(7, "right"), (7.0, "right"), ([5, 7], "right"), (0.7, "wrong")])
def test_a_gold_may_be_a_number_as_data_have_it(gold: float | list[float], kind: str) -> None:
    assert grade(r"\boxed{7}", gold).kind == kind
    assert grade(r"\boxed{7}", None).reason == "no_gold"


def test_what_is_too_large_is_a_limit_without_being_computed() -> None:
    product = r"\prod_{k=1}^{10^7} k"
    begin = process_time()
    assert grade_here(rf"\boxed{{{product}}}", "7")[:2] == ("wrong", "limit")
    assert grade_here("7", product)[:2] == ("unknown", "gold_limit")
    assert grade_here("\\boxed{" + "1" * 100_000 + "}", "7")[:2] == ("wrong", "limit")
    assert process_time() - begin < 5
    assert grade_here(r"\prod_{k=1}^{5} k", "120").right


def test_a_function_of_a_module_is_that_function() -> None:
    gold = "np.arcsin(10/13)"
    assert grade(r"\boxed{\arcsin\frac{10}{13}}", gold).right and grade(r"\boxed{math.asin(10/13)}", gold).right
    assert grade(r"\boxed{\arcsin\frac{10}{17}}", gold).kind == "wrong" and grade("-98765", gold).kind == "wrong"
