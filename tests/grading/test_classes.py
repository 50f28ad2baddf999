"""Each class of answers: equivalent spellings are right, near misses are wrong."""

from __future__ import annotations

import pytest

from lemma.grading import Rules, grade
from tests.grading.classes import CLASSES


@pytest.mark.parametrize("name", CLASSES)
def test_class(name: str) -> None:
    for gold, rights, wrongs in CLASSES[name]:
        for kind, spellings in (("right", [gold, *rights]), ("wrong", wrongs)):
            for spelling in spellings:
                for prediction in (spelling, f"\\boxed{{{spelling}}}", f"Thus it is $\\boxed{{{spelling}}}$."):
                    verdict = grade(prediction, gold)
                    assert verdict.kind == kind, f"gold {gold!r}, prediction {prediction!r}: {verdict}"


def test_gold_and_answer_are_not_interchangeable() -> None:
    assert grade("x+y=5", "5").right
    assert not grade("5", "2x+y=5").right
    assert grade("x=3+4=7", "7").right
    assert not grade("7", "3x=21").right


@pytest.mark.parametrize(
    ("prediction", "gold", "right"),
    [
        ("1.001+1.733i", r"1+\sqrt{3} i", True),
        ("-9", r"1+\sqrt{3} i", False),
        ("1e400", "1.001e400", True),
        ("10^{400}", "10^{401}", False),
        (r"10^{320} \pi", r"10^{320} \cdot 3.15", True),
        (r"\infty", "5", False),
        ("5", r"\infty", False),
    ],
)
def test_tolerance_for_complex_huge_and_infinite_numbers(prediction: str, gold: str, right: bool) -> None:
    assert grade(prediction, gold, Rules(relative=0.01)).right is right


def test_tolerance_is_off_unless_asked_for() -> None:
    assert not grade("3.14", "3.14159").right
    assert grade("3.14", "3.14159", Rules(relative=0.01)).right
    assert grade("1.732", r"\sqrt{3}", Rules(absolute=0.001)).right
    assert not grade("1.7", r"\sqrt{3}", Rules(absolute=0.001)).right


def test_rules() -> None:
    assert grade("1,2", "2,1").right and not grade("1,2", "2,1", Rules(ordered=True)).right
    assert grade("25", r"25\%").right and not grade("25", r"25\%", Rules(percent="strict")).right
    assert grade("0.25", r"25\%", Rules(percent="strict")).right
    assert grade("monday", "Monday").right and not grade("monday", "Monday", Rules(case=True)).right
    assert grade(r"\sum_{k=1}^{4} k", "10", Rules(symbolic=False))[:2] == ("wrong", "unreadable")


def test_reasons() -> None:
    assert grade(r"\boxed{4}", "5")[:3] == ("wrong", "number", "4")
    assert grade("", "5")[:2] == ("wrong", "no_answer")
    assert grade("5", "")[:2] == ("unknown", "no_gold")
    assert grade("5", " ")[:2] == ("unknown", "no_gold")
    assert grade(r"9^{9^{9}}", "5")[:2] == ("wrong", "limit")
    assert grade("5", r"9^{9^{9}}")[:2] == ("unknown", "gold_limit")
    assert grade(r"9^{9^{9}}", r"9^{9^{9}}")[:2] == ("right", "exact")
    assert grade("(B)", "B")[:2] == ("right", "choice")
    assert grade(r"\sum_{k=1}^{4} k", "10")[:2] == ("right", "symbolic")
    assert grade("x", "y").seconds > 0


def test_from_the_package_without_heavy_imports() -> None:
    import subprocess
    import sys

    code = "import sys, lemma; assert not {'sympy','torch','pydantic'} & set(sys.modules); print(lemma.grade('1/2','0.5').kind); assert 'sympy' not in sys.modules"  # noqa: E501
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "right\n"
