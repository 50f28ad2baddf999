from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lemma.plugins.vary.marks import holds, parsed, value_of, without_marks, working_of


def value(text):
    found = parsed(text)
    return None if found is None else value_of(found[0], [number.value for number in found[1]])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2+3*4", 14),
        ("(2+3)*4", 20),
        ("10-4-3", 3),
        ("100/8/2", Fraction(25, 4)),
        ("1/3*6", 2),
        (".25*8", 2),
        ("1,250 + 0.50", Fraction(2501, 2)),
        ("20% * 50", 10),
        ("3 x $4 ÷ 2", 6),
        ("7 – 2", 5),
        ("4/0", None),
        ("2(3)", None),
        ("2+", None),
        ("-3", None),
        ("__import__('os')", None),
        ("9**9", None),
        ("(" * 50 + "1" + ")" * 50, None),
    ],
)
def test_expressions_are_read_exactly_or_not_at_all(text, expected):
    assert value(text) == expected


@st.composite
def expressions(draw, depth=3):
    """An expression as text and its value by Python's own fractions."""
    if depth == 0 or draw(st.booleans()):
        number = draw(st.integers(1, 999))
        return str(number), Fraction(number)
    left, one = draw(expressions(depth - 1))
    right, other = draw(expressions(depth - 1))
    sign = draw(st.sampled_from("+-*/" if other else "+-*"))
    computed = {"+": one + other, "-": one - other, "*": one * other}
    return f"({left}){sign}({right})", computed.get(sign) if sign != "/" else one / other


@given(expressions())
@settings(max_examples=150, deadline=None)
def test_values_are_those_of_fractions(pair):
    text, expected = pair
    assert value(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("He pays 3*4 = $<<3*4=12>>12.", "He pays 3*4 = $12."),
        ("6 + 1 =<<6+1=7>>7 pens", "6 + 1 =7 pens"),
        ("so <<8/2=4>> 4 left", "so 4 left"),
        ("that is <<8/2=4>> apples", "that is 4 apples"),
        ("1 << 3 and a<<b=c>>d stay", "1 << 3 and a<<b=c>>d stay"),
        ("no marks", "no marks"),
        ("<<1+1=2>>2\n<<2+2=4>>4", "2\n4"),
    ],
)
def test_marks_are_taken_out(text, expected):
    assert without_marks(text) == expected


def test_a_working_is_taken_apart():
    found = working_of("It is 3 x 4 = <<3*4=12>>12. Then 12 + 5 = 17.")
    assert found is not None
    assert found.text == "It is 3 x 4 = 12. Then 12 + 5 = 17."
    assert [one.result.value for one in found.marks] == [12]
    assert [one.result.value for one in found.sums] == [12, 17]


@pytest.mark.parametrize(
    "working",
    [
        "3*4 = <<3*4=13>>13",
        "3*4 = <<3*4=12>>12, and 2 + 2 = 5",
        "3*4 = <<3*4>>12",
        "3*4 = <<3**4=81>>81",
        "10/3 = <<10/3=3.33>>3.33",
        "twelve",
    ],
)
def test_wrong_or_unreadable_workings_do_not_hold(working):
    assert not holds(working, "12")


def test_the_last_result_is_the_answer():
    assert holds("3*4 = <<3*4=12>>12", "12") and not holds("3*4 = <<3*4=12>>12", "13")
    assert holds("3*4 = <<3*4=12>>12\n12 + 1 = 13", "13")
