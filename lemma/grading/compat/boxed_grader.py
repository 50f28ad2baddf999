"""The boxed grader of the r1_zero work, fast and slow, and the rewards built on it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from lemma.grading.compat.strings import box_content, mathd
from lemma.grading.compat.sympy_strings import spelling, sympy_equal
from lemma.grading.extract import extract
from lemma.grading.rules import Rules

Gold = str | int | float | Sequence[str]
Scores = dict[str, float]


def latex_equal(answer: str, gold: str) -> bool:
    """The slow comparison: the plain-text spelling, then math-verify."""
    from lemma.grading.compat.math_verify_calls import verified

    if any(len(text) > 128 and _repeats(text) for text in (answer, gold)):
        return False
    if spelling(gold) == spelling(answer):
        return True
    return verified(gold if "$" in gold else f"${gold}$", answer if "$" in answer else f"${answer}$", boxed_first=True)


def _repeats(text: str) -> bool:
    """Whether the text repeats itself: the mean length of common prefixes of neighbouring suffixes exceeds a fifth."""
    text = text[:2_000]
    order = sorted(range(len(text)), key=lambda start: text[start:])
    total = 0
    for first, second in pairwise(order):
        limit = len(text) - max(first, second)
        length = 0
        while length < limit and text[first + length] == text[second + length]:
            length += 1
        total += length
    return total * 2 / (len(text) * (len(text) + 1)) > 0.2


def grade_boxed(answer: str, gold: str, fast: bool = True, compat: bool = True) -> bool:
    """Whether the boxed grader takes the answer for the gold. Without `compat`, single letters are not units."""
    if "\\boxed" in gold:
        inside = box_content(gold)
        if inside is None:
            return False
        gold = inside
    if mathd(answer, lone_letters=compat) == mathd(gold, lone_letters=compat) or sympy_equal(answer, gold):
        return True
    return not fast and latex_equal(answer, gold)


def _any_gold(answer: str, gold: Gold, fast: bool, compat: bool) -> bool:
    golds = [gold] if isinstance(gold, str) else [str(gold)] if isinstance(gold, int | float) else list(gold)
    return any(grade_boxed(answer, str(one), fast, compat) for one in golds)


def _scores(formatted: bool, right: bool) -> Scores:
    return {"format_reward": float(formatted), "answer_reward": float(right), "reward": float(right)}


def r1_zero(response: str, gold: Gold, fast: bool = True, compat: bool = True) -> Scores:
    """The r1_zero reward. `compat` wants exactly one space between the tags and keeps text after `</answer>`."""
    if compat:
        formatted = "</think> <answer>" in response and "</answer>" in response
    else:
        formatted = re.search(r"</think>\s*<answer>.*</answer>", response, re.DOTALL) is not None
    if not formatted:
        return _scores(False, False)
    answer = response.split("<answer>")[-1]
    answer = answer.replace("</answer>", "") if compat else answer.partition("</answer>")[0]
    if "\\boxed" in answer:
        inside = box_content(answer)
        if inside is None:
            return _scores(True, False)
        answer = inside
    return _scores(True, _any_gold(answer, gold, fast, compat))


def question_only(response: str, gold: Gold, fast: bool = True, compat: bool = True) -> Scores:
    """Formatted where a box can be extracted; the box is graded. Without `compat`, an `\\fbox` counts as well."""
    answer = box_content(response) if compat else extract(response, Rules(order=("box",), thinking="whole")).answer
    if answer is None:
        return _scores(False, False)
    return _scores(True, _any_gold(answer, gold, fast, compat))


def boxed_score(response: str, gold: Gold, fast: bool = False, compat: bool = True) -> tuple[dict[str, bool], float]:
    """The evaluation grader of LUFFY: whether there was a box, and the score."""
    scores = question_only(response, gold, fast, compat)
    return {"formatted": scores["format_reward"] == 1.0}, scores["reward"]
