"""What counts as an answer: a table of completions for each format, and the round trip of any text."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lemma.core.types import Demonstration, Message, Problem
from lemma.formats import FAULTS, FORMATS, HARMLESS, Parsed, make_format, read_answer
from lemma.grading import Rules

PROBLEM = Problem((Message("user", "What is 2 + 2?"),))
WORKED = "two<end_working_out>"

TABLE = [
    # format, completion, reasoning, answer, faults
    ("r1_zero", " two </think> <answer> 4 </answer>", "two", "4", ()),
    ("r1_zero", "<think> two </think> <answer>4</answer>", "two", "4", ()),
    ("r1_zero", " two </think>\n\n<answer> 4 </answer>", "two", "4", ()),
    ("r1_zero", " two </think> <answer> 4 </answer> and so on", "two", "4", ("text_after_answer",)),
    ("r1_zero", " a </think> <answer> 3 </answer> <answer> 4 </answer>", "a", "4", ("several_answers",)),
    ("r1_zero", " a </think> so <answer> 4 </answer>", "a", "4", ("text_before_answer",)),
    ("r1_zero", " <answer> 3 </answer> hm </think> <answer> 4 </answer>", "<answer> 3 </answer> hm", "4", ()),
    ("r1_zero", " <answer> 4 </answer> hm </think> done", "<answer> 4 </answer> hm", None, ("no_answer",)),
    ("r1_zero", " two <answer> 4 </answer>", "two <answer> 4 </answer>", None, ("missing_think_end",)),
    ("r1_zero", " two </think> <answer> 4", "two", None, ("no_closing_tag",)),
    ("r1_zero", " two </think> <answer> </answer>", "two", None, ("no_answer",)),
    ("r1_zero", " two </think> 4", "two", None, ("no_answer",)),
    ("r1_zero", "", "", None, ("missing_think_end",)),
    ("r1_zero", " a </think> <answer> $\\boxed{\\frac{1}{2}}$ </answer>", "a", "\\frac{1}{2}", ()),
    ("r1_zero", " a </think> <answer> \\boxed{4 </answer>", "a", None, ("no_answer",)),
    ("xml", "<reasoning>\na\n</reasoning>\n<answer>\n4\n</answer>\n", "a", "4", ()),
    ("xml", "<reasoning>a\nb</reasoning><answer>4</answer>", "a\nb", "4", ()),
    ("xml", "Sure. <reasoning>a</reasoning><answer>4</answer>", "a", "4", ("text_before_think",)),
    ("xml", "<answer>4</answer>", None, "4", ("missing_think_start", "missing_think_end")),
    ("xml", "a</reasoning><answer>4</answer>", "a", "4", ("missing_think_start",)),
    ("xml", "<reasoning>a <answer>4</answer>", "a <answer>4</answer>", None, ("missing_think_end",)),
    ("xml", "<reasoning>a</reasoning><answer>4</answer>!", "a", "4", ("text_after_answer",)),
    ("xml", "<reasoning>a</reasoning><answer>4", "a", None, ("no_closing_tag",)),
    ("xml", "the answer is 4", None, None, ("missing_think_start", "missing_think_end", "no_answer")),
    ("think_answer", "<think> a </think> <answer> 4 </answer>", "a", "4", ()),
    ("think_answer", "<think>a\nb</think><answer>$\\boxed{4}$</answer>", "a\nb", "4", ()),
    ("think_answer", "a </think> <answer> 4 </answer>", "a", "4", ("missing_think_start",)),
    ("think_answer", "<think> a </think> <answer> \\boxed{} </answer>", "a", None, ("no_answer",)),
    ("working_out", WORKED + "<SOLUTION>4</SOLUTION>", "two", "4", ()),
    ("working_out", "<start_working_out>" + WORKED + "\n\n<SOLUTION>\n4\n</SOLUTION>\n", "two", "4", ()),
    ("working_out", WORKED + "<SOLUTION>4</SOLUTION></s>", "two", "4", ("text_after_answer",)),
    ("working_out", WORKED + "<SOLUTION>4", "two", None, ("no_closing_tag",)),
    ("working_out", "two<SOLUTION>4</SOLUTION>", "two<SOLUTION>4</SOLUTION>", None, ("missing_think_end",)),
    ("boxed", "so $\\boxed{4}$.", "so $", "4", ()),
    ("boxed", "\\boxed{\\frac{1}{2}}", "", "\\frac{1}{2}", ()),
    ("boxed", "\\boxed {4}", "", "4", ()),
    ("boxed", "\\boxed{3} no, \\boxed{4}", "\\boxed{3} no,", "4", ("several_answers",)),
    ("boxed", "\\boxed{4}, that is \\boxed{4}", "\\boxed{4}, that is", "4", ()),
    ("boxed", "\\boxed{3} or \\boxed{4", "\\boxed{3} or", None, ("no_closing_tag",)),
    ("boxed", "\\boxed{x = \\boxed{4}}", "\\boxed{x =", "4", ("several_answers",)),
    ("boxed", "\\boxed{\\left\\{ 1 \\right.}", "", "\\left\\{ 1 \\right.", ()),
    ("boxed", "\\boxed{}", "", None, ("no_answer",)),
    ("boxed", "four", "four", None, ("no_answer",)),
    ("question_only", "so \\boxed{4}", "so", "4", ()),
    ("think_boxed", "a\n</think>\n\nso \\boxed{4}", "a", "4", ()),
    ("think_boxed", "<think>\na </think>\n\\boxed{4}", "a", "4", ()),
    ("think_boxed", "\\boxed{3} </think> \\boxed{4}", "\\boxed{3}", "4", ()),
    ("think_boxed", "a \\boxed{4}", "a \\boxed{4}", None, ("missing_think_end",)),
    ("think_boxed", "\\boxed{4} </think> done", "\\boxed{4}", None, ("no_answer",)),
    ("think_boxed", "a </think> b </think> \\boxed{4}", "a", None, ("several_think_ends", "no_answer")),
    ("think_boxed", "a </think> \\boxed{3} </think> \\boxed{4}", "a", "3", ("several_think_ends",)),
    ("alpaca", "two\n\nThe answer is: 4", "two", "4", ()),
    (
        "alpaca",
        "The answer is: 3\nThe answer is: 4\nbye",
        "The answer is: 3",
        "4",
        ("several_answers", "text_after_answer"),
    ),
    ("alpaca", "it is 4", "it is 4", None, ("no_answer",)),
    ("alpaca", "The answer is:\n4", "", None, ("no_answer",)),
    ("chat", "so \\boxed{4}", "so", "4", ()),
    ("own", "so \\boxed{4}", "so", "4", ()),
    ("own", "a \\boxed{3} </think> \\boxed{4}", "a \\boxed{3}", "4", ()),
    ("own", "<think> a \\boxed{3}", "a \\boxed{3}", None, ("missing_think_end",)),
    ("qwen", "so \\boxed{4}", "so", "4", ()),
    ("simplerl", "<think>a</think>\\boxed{4}", "a", "4", ()),
    ("prime", "<think> a </think> <answer> \\boxed{4} </answer>", "a", "4", ()),
    ("prime", "<think> a </think> <answer> 4 </answer>", "a", None, ("no_answer",)),
    ("prime_sft", "so \\boxed{3}, no, \\boxed{4}", "so \\boxed{3}, no,", "4", ("several_answers",)),
    ("prime_code", "so\n```python\nprint(4)\n```\n", "so", "print(4)", ()),
    ("prime_code", "```python\n3\n```\nno\n```python\n4\n```\nyes", "```python\n3\n```\nno", "4",
     ("several_answers", "text_after_answer")),
    ("prime_code", "```python\nprint(4)", "", None, ("no_closing_tag",)),
    ("prime_code", "print(4)", "print(4)", None, ("no_answer",)),
    ("no", "so \\boxed{4}", "so", "4", ()),
    ("no", "<think> \\boxed{4}", "\\boxed{4}", None, ("missing_think_end",)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "completion", "reasoning", "answer", "faults"), TABLE)
def test_parse_rules(
    name: str, completion: str, reasoning: str | None, answer: str | None, faults: tuple[str, ...]
) -> None:
    assert make_format(name).parse(completion) == Parsed(reasoning, answer, faults)


def test_the_table_shows_every_format_and_every_fault_but_the_compatible_one() -> None:
    assert {row[0] for row in TABLE} == set(FORMATS)
    assert {fault for row in TABLE for fault in row[4]} == set(FAULTS) - {"wrong_space"}


@pytest.mark.parametrize(
    ("faults", "answer", "ok"),
    [
        ((), "4", True),
        (("several_answers", "text_after_answer"), "4", True),
        (("text_before_answer",), "4", False),
        (("no_answer",), None, False),
        ((), None, False),
    ],
)
def test_ok_means_an_answer_and_harmless_faults_only(faults: tuple[str, ...], answer: str | None, ok: bool) -> None:
    assert Parsed("a", answer, faults).ok is ok
    assert set(FAULTS) >= HARMLESS


@pytest.mark.parametrize(
    ("completion", "kept"),
    [
        (" a </think> <answer> 4 </answer>", True),
        (" a </think>\n<answer> 4 </answer>", False),
        (" a </think><answer> 4 </answer>", False),
        (" a </think>  <answer> 4 </answer>", False),
    ],
)
def test_strict_space_wants_exactly_one(completion: str, kept: bool) -> None:
    parsed = make_format({"name": "r1_zero", "strict_space": True}).parse(completion)
    assert parsed.answer == "4"
    assert parsed.ok is kept
    assert ("wrong_space" in parsed.faults) is not kept
    assert make_format("r1_zero").parse(completion).ok


@pytest.mark.parametrize(
    ("name", "completion"),
    [
        ("r1_zero", " so <answer> 4 </answer>"),
        ("xml", "<reasoning> so <answer>4</answer>"),
        ("working_out", "so <SOLUTION>4</SOLUTION>"),
        ("think_boxed", "so \\boxed{4}"),
        ("own", "<think>so \\boxed{4}"),
    ],
)
def test_unfinished_reasoning_counts_only_on_request(name: str, completion: str) -> None:
    assert make_format(name).parse(completion).answer is None
    parsed = make_format({"name": name, "grade_unfinished": True}).parse(completion)
    assert (parsed.answer, parsed.faults, parsed.ok) == ("4", ("missing_think_end",), False)


def test_a_template_that_opens_the_thinking_is_told_so() -> None:
    for name in ("own", "boxed", "prime_sft"):
        fmt = make_format({"name": name, "thinking": True})
        assert fmt.parse("so \\boxed{4}") == Parsed("so \\boxed{4}", None, ("missing_think_end",))
        assert fmt.parse(fmt.compose("so", "4")) == Parsed("so", "4")


def test_parsing_degenerate_text_takes_no_time() -> None:
    started = time.process_time()
    for name in FORMATS:
        for piece in [
            "\\boxed{",
            "<answer>",
            "</think>",
            "{",
            "\\boxed{4}",
            "<think>",
            "The answer is:",
            "```python\n",
        ]:
            make_format(name).parse(piece * 5000 + "}" * 5000)
    assert time.process_time() - started < 5


TAG_TEXT = (
    "<think",
    "</think",
    "<answer",
    "</answer",
    "reasoning>",
    "working_out>",
    "SOLUTION>",
    "\\boxed",
    "answer is:",
)
words = st.text(max_size=60).filter(lambda text: not any(tag in text for tag in TAG_TEXT))
PIECES = [
    "4",
    "x+1",
    "\\frac",
    "{1}",
    "{2^{10}}",
    "\\{",
    "\\}",
    "'",
    '"',
    "½",
    "{{ x }}",
    "{% if %}",
    "🙂",
    " ",
    "\\\\",
]
pieces = st.sampled_from(PIECES)
answers = st.lists(pieces, min_size=1, max_size=4).map("".join).filter(str.strip)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(reasoning=words, answer=answers)
def test_what_is_composed_is_parsed_again(reasoning: str, answer: str) -> None:
    for name in FORMATS:
        fmt = make_format(name)
        target = fmt.target(Demonstration(PROBLEM, reasoning=reasoning, answer=answer))
        assert fmt.parse(target) == Parsed(reasoning.strip(), answer.strip())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(reasoning=words, answer=words.filter(str.strip))
def test_formats_with_closing_tags_take_any_answer(reasoning: str, answer: str) -> None:
    for name in ("r1_zero", "xml", "working_out"):
        fmt = make_format(name)
        target = fmt.target(Demonstration(PROBLEM, reasoning=reasoning, answer=answer))
        assert fmt.parse(target) == Parsed(reasoning.strip(), answer.strip())


@settings(max_examples=80, deadline=None, derandomize=True)
@given(completion=st.lists(st.sampled_from([*TAG_TEXT, ">", "</", "{", "}", "4", " ", "\n"])).map("".join))
def test_any_text_is_parsed(completion: str) -> None:
    for name in FORMATS:
        parsed = make_format(name).parse(completion)
        assert set(parsed.faults) <= set(FAULTS)
        assert parsed.answer is None or parsed.answer == parsed.answer.strip() != ""
        assert parsed.answer is not None or not parsed.ok


@pytest.mark.parametrize(
    ("system", "completion", "finish", "answer"),
    [
        (None, "4 * 5 = 20\n#### 20\nThe answer is: 20", "stop", "20"),
        (None, r"First \boxed{7}. The answer is 20.", "stop", "7"),
        (None, "4 * 5 = 20, and then", "length", None),
        (None, "<think> 4 * 5 = 20", "stop", None),
        (r"Put it within \boxed{}.", "The answer is: 20", "stop", None),
    ],
)
def test_where_no_form_was_asked_for_the_answer_may_stand_anywhere(system, completion, finish, answer):
    found = read_answer(make_format({"name": "chat", "system": system}), completion, finish, Rules())
    assert found.answer == answer and found.ok == (answer is not None)
    assert read_answer(make_format("boxed"), "The answer is: 20", "stop", Rules()).answer is None
