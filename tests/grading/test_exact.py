"""Equality is exact: no difference is too small to see, and an answer that contradicts itself is not right."""

from __future__ import annotations

import pytest

from lemma.grading import Verdict
from lemma.grading.quick import quick
from lemma.grading.symbolic import grade_here

EQUAL = [
    (r"\pi", r"\frac{2\pi}{2}"),
    (r"\sqrt8", r"2\sqrt2"),
    (r"\ln(2^{1000})", r"1000\ln 2"),
    (r"\sqrt2", r"10^{60}+\sqrt2-10^{60}"),
    (r"3^{2023}\sqrt2", r"\sqrt{2\cdot3^{4046}}"),
    (r"x^{2023}\sqrt x", r"\sqrt x\cdot x^{2023}"),
    (r"\frac{(1+\sqrt5)^{100}-(1-\sqrt5)^{100}}{2^{100}\sqrt5}", "354224848179261915075"),
    (r"0", r"\sin(\pi)"),
    (r"e^{x}\sin(2x)", r"2e^{x}\sin(x)\cos(x)"),
]


def kind(prediction: str, gold: str) -> str:
    verdict = quick(prediction, gold)
    assert isinstance(verdict, Verdict), (prediction, gold)
    return verdict.kind


@pytest.mark.parametrize(("gold", "answer"), EQUAL)
@pytest.mark.parametrize("size", ["10^{-45}", "0." + "0" * 70 + "1", r"\frac{1}{3^{700}}", "10^{-3000}", "10^{-19000}"])
def test_any_difference_makes_an_answer_wrong(gold: str, answer: str, size: str) -> None:
    assert kind(answer, gold) == "right"
    assert kind(f"{answer}+{size}", gold) == "wrong"
    assert kind(answer, f"{gold}-{size}") != "right"


@pytest.mark.parametrize(
    "template",
    [
        r"x+y=1+%s",
        r"y=\pi x+%s",
        r"(1,\sqrt2+%s)\cup(3,4)",
        r"x<\pi+%s",
        r"\{1,\sqrt2+%s\}",
        r"(\pi,\pi+%s)",
        r"1:\pi+%s",
    ],
)
@pytest.mark.parametrize("size", ["10^{-45}", "10^{-900}"])
def test_so_do_differences_inside_structures(template: str, size: str) -> None:
    assert kind(template % "0+0", template % "0") == "right"
    assert kind(template % size, template % "0") == "wrong"


def test_small_numbers_are_not_all_zero() -> None:
    assert kind(r"\sqrt2\cdot10^{-60}", r"\pi\cdot10^{-60}") == "wrong"
    assert kind(r"\sqrt2\cdot10^{-60}", "0") == "wrong"


@pytest.mark.parametrize("size", ["10^{-45}", "0.00000000000000001", r"\frac{1}{10^{99}}"])
@pytest.mark.parametrize("gold", ["0.5", r"\frac12", r"\int_0^1 x dx"])
def test_sympy_sees_them_too(gold: str, size: str) -> None:
    assert grade_here(r"\int_0^1 y dy", gold).kind == "right"
    assert grade_here(rf"\int_0^1 x dx + {size}", gold).kind == "wrong"


@pytest.mark.parametrize(
    "answer",
    ["41=42", "2+3=42", r"\frac{85}{2}=42", "42=42.5=42", r"\sqrt{1763}=42", "x=42, 1=2", "40+1=42=41+1"],
)
def test_an_answer_that_contradicts_itself_is_wrong(answer: str) -> None:
    for gold in ("42", "x=42", "x=42, y=2"):
        assert kind(rf"\boxed{{{answer}}}", gold) == "wrong"


def test_of_a_chain_that_begins_with_a_name_the_last_side_counts() -> None:
    assert kind(r"\boxed{x=5+5=11}", "x=11") == "right"
    assert kind(r"\boxed{x=5+5=11}", "10") == "wrong"


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        (r"40+2=42", "42"),
        (r"x=40+2=42", "42"),
        (r"50\%=0.5", "0.5"),
        (r"\frac{22}{7}=3.14", "3.14"),
        (r"\frac23=0.666", "0.666"),
        (r"180^\circ=\pi", r"\pi"),
        (r"f(2)=4=2^2", "4"),
        (r"\sqrt2\approx1.5", r"\sqrt2"),
    ],
)
def test_steps_and_rounded_values_contradict_nothing(answer: str, gold: str) -> None:
    assert kind(rf"\boxed{{{answer}}}", gold) == "right"


def test_factorials_of_symbols_are_within_the_limits() -> None:
    gold = r"\frac{d!}{2k(d-k)!}"
    assert kind(r"\frac{d!}{k\cdot 2(d-k)!}", gold) == "right"
    for wrong in (r"\frac{d!}{3k(d-k)!}", "-98765.4321"):
        assert kind(wrong, gold) == "wrong"
