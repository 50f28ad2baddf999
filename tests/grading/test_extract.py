"""Where the final answer of a completion is found, rule by rule."""

from __future__ import annotations

import pytest

from lemma.grading import Rules, extract, grade

CASES = [
    # boxes
    (r"\boxed{3}, so the total is \boxed{4}", "4", "box"),
    (r"\boxed{3}, wait, it is \boxed{4}", "4", "box"),
    (r"x=\boxed{3} and then \boxed{4}", "4", "box"),
    (r"x=\boxed{3} and y=\boxed{4}", "3, 4", "box"),
    ("so \\boxed{12}.", "12", "box"),
    ("first \\boxed{3}, wait.\n\nNo: \\boxed{4}", "4", "box"),
    ("\\boxed{\\frac{1}{\\sqrt{2}}} is it", "\\frac{1}{\\sqrt{2}}", "box"),
    ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}", "box"),
    ("\\fbox{7}", "7", "box"),
    ("\\boxed 7", "7", "box"),
    ("\\boxed{ \\boxed{9} }", "9", "box"),
    ("$\\boxed{2}$ and $\\boxed{5}$", "2, 5", "box"),
    ("\\boxed{2}, \\boxed{2}", "2", "box"),
    ("put it in \\boxed{}: \\boxed{8}", "8", "box"),
    ("\\boxed{3} then 40 more, \\boxed{4", "3", "box"),
    ("it is \\boxed{5", None, "box"),
    ("the answer is 6, \\boxed{}", None, "box"),
    ("\\boxed{5} although 17 is larger", "5", "box"),
    # tags
    ("<answer> 12 </answer>", "12", "tag"),
    ("<answer>1</answer> no, <answer>2</answer>", "2", "tag"),
    ("<answer>\\boxed{3}</answer>", "3", "tag"),
    ("<answer>4</answer> and 5 is trailing text", "4", "tag"),
    ("<answer>42", "42", "tag"),
    ("<answer>The answer is 5.</answer>", "5", "tag"),
    ("<answer>In all there are 7 apples left</answer>", "7", "tag"),
    ("<answer>a blue whale of the sea</answer>", "a blue whale of the sea", "tag"),
    ("so it is 9 <answer></answer>", None, "tag"),
    ("a<end_working_out><SOLUTION>6</SOLUTION>", "6", "tag"),
    ("\\boxed{1} <answer>2</answer>", "2", "tag"),
    # thinking
    ("<think> maybe \\boxed{1} </think> \\boxed{2}", "2", "box"),
    ("<think> it must be \\boxed{1} </think> I am not sure", "I am not sure", "bare"),
    ("<think> it must be \\boxed{1}", None, "none"),
    ("thought </think> <answer> 3 </answer>", "3", "tag"),
    ("a</think>\\boxed{1}</think>\\boxed{2}", "2", "box"),
    # other marks
    ("6 + 6 = 12\n#### 12", "12", "hash"),
    ("#### 1,200\nNext question", "1,200", "hash"),
    ("The answer is 42.", "42", "phrase"),
    ("Final Answer: The final answer is $\\frac{1}{2}$. I hope it is correct.", "\\frac{1}{2}", "phrase"),
    ("Answer: (C)", "C", "phrase"),
    ("I think\nA: 17", "17", "phrase"),
    ("**Final Answer**\n\n$x = 3$", "x = 3", "phrase"),
    ("The answer is:\n\\[\n401\n\\]", "401", "phrase"),
    ("After all this I choose option B", "B", "choice"),
    ("So I would choose B", "B", "choice"),
    ("After some thought, C is the correct one.", "C", "choice"),
    ("All in all we choose a number: 12", "12", "number"),
    ("we find that the value $x$ is $17$", "17", "math"),
    ("there are 12 apples in all of the 3 boxes", "12", "number"),
    ("it costs 1,250.50 dollars in the end", "1,250.50 dollars", "number"),
    ("so the share grows by 25 % in this case", "25 %", "number"),
    # a turn of someone else, control tokens
    ("\\boxed{4}<|im_end|>\n<|im_start|>user\nnow \\boxed{5}", "4", "box"),
    ("The answer is 3.<|endoftext|>", "3", "phrase"),
    # bare answers
    ("12", "12", "bare"),
    ("\\frac{1}{2}", "\\frac{1}{2}", "bare"),
    ("blue whale", "blue whale", "bare"),
    ("", None, "none"),
    ("   \n ", None, "none"),
]


@pytest.mark.parametrize(("text", "answer", "method"), CASES)
def test_rules(text: str, answer: str | None, method: str) -> None:
    found = extract(text)
    assert (found.answer, found.method) == (answer, method)


def test_order_is_set_by_the_rules() -> None:
    text = "\\boxed{1} <answer>2</answer>\n#### 3"
    assert extract(text, Rules(order=("box",))).answer == "1"
    assert extract(text, Rules(order=("hash", "tag"))).answer == "3"
    assert extract("no mark but 5 in it, as one sees", Rules(order=("box", "tag"))).answer is None


def test_thinking_can_be_searched_where_asked() -> None:
    text = "<think> it is \\boxed{7}"
    assert grade(text, "7").kind == "wrong"
    assert grade(text, "7", Rules(thinking="whole")).kind == "right"


def test_own_tags() -> None:
    assert extract("<final>5</final>", Rules(tags=("final",))).answer == "5"


def test_no_number_is_taken_where_a_box_or_tag_exists() -> None:
    for text in ("it is 5, \\boxed{", "it is 5 <answer> </answer>", "5 \\boxed{}"):
        assert grade(text, "5")[:2] == ("wrong", "no_answer")
