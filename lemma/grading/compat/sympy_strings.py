"""The second comparison of the boxed grader: a plain-text spelling, then the difference of the two formulas.

The original hands the difference to sympy's reader, which evaluates text as Python. Here it is read by Lemma's own
small reader, which does not, and gives the same values on formulas that the original's own filter lets through.
"""

from __future__ import annotations

import re
from contextlib import suppress
from fractions import Fraction
from functools import lru_cache
from typing import Any

from lemma.grading.expression import Tree, Unreadable, read
from lemma.grading.limits import LimitExceeded, check_shape
from lemma.grading.normal_form import normalise
from lemma.grading.rules import Rules
from lemma.grading.single import Context, GoldLimit, Undecided, same_value
from lemma.grading.tokens import names, tokenise

_UNITS = names("degree cm centimeter meter mile second minute hour day week month year foot feet inch yard")
_COMMAS = re.compile(r"(\d)(,)(\d\d\d)($|\D)")
_FRACTION = re.compile(r"-?[0-9]+.?/0*[1-9][0-9]*.?")
_BRACKETS = "()[]"
_EXACT = Rules(rounded=False)


@lru_cache(maxsize=1)
def _latex_to_text() -> Any:
    from pylatexenc.latex2text import LatexNodes2Text

    return LatexNodes2Text()


def _plain(latex: str) -> str:
    latex = latex.replace("\\tfrac", "\\frac").replace("\\dfrac", "\\frac").replace("\\frac", " \\frac")
    text: str = _latex_to_text().latex_to_text(latex)
    for sign, name in (("√", "sqrt"), ("π", "pi"), ("∞", "inf"), ("∪", "U"), ("·", "*"), ("×", "*")):
        text = text.replace(sign, name)
    return text.strip()


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def strip_commas(text: str) -> str:
    """Without commas between groups of three digits."""
    while True:
        shorter = _COMMAS.sub(r"\1\3\4", text)
        if shorter == text:
            return text
        text = shorter


def _is_whole(text: str) -> bool:
    value = _float(strip_commas(text))
    return value is not None and abs(value) < 1e300 and abs(value - round(value)) <= 1e-7


def spelling(text: str) -> str:
    """The plain-text spelling that the original compares."""
    whole = re.search(r"^\\text\{(?P<text>.+?)\}$", text)
    text = whole["text"] if whole else text
    text = text.replace("\\%", "%").replace("\\$", "$").replace("$", "").replace("%", "")
    text = text.replace(" or ", " , ").replace(" and ", " , ")
    for word, power in (("million", 6), ("billion", 9), ("trillion", 12)):
        text = text.replace(word, f"*10^{power}")
    for unit in _UNITS:
        text = re.sub(rf"{unit}(es)?(s)? *(\^[0-9]+)?", "", text)
    text = re.sub(r"\^ *\\circ", "", text)
    if text and text[0] == "{" and text[-1] == "}":
        text = text[1:-1]
    text = re.sub(r",\\! *", "", text)
    value = _float(text)
    if value is not None and abs(value) < 1e300 and abs(value - round(value)) <= 1e-7:
        text = str(round(value))
    if "\\" in text:
        with suppress(ValueError, IndexError, KeyError, RecursionError):
            text = _plain(text)
    text = re.sub(r"- *", "-", text)
    text = re.sub(r"([0-9]) +([0-9])", r"\1+\2", text)
    text = text.replace(" ", "").replace("{", "").replace("}", "").lower()
    return str(round(float(strip_commas(text)))) if _is_whole(text) else text


def _members(text: str) -> list[str]:
    text = strip_commas(text)
    if not text:
        return []
    if len(text) > 2 and text[0] in _BRACKETS and text[-1] in _BRACKETS and not any(c in text[1:-1] for c in _BRACKETS):
        return [part.strip() for part in text[1:-1].split(",")]
    return [text]


def _allowed(text: str) -> bool:
    """The original's filter: at most two letters, no large or stacked exponents."""
    letters = {c for c in text.replace("sqrt", "").replace("frac", "") if c.isalpha()}
    if len(letters) > 2 or "^{" in text or "^(" in text:
        return False
    return not re.search(r"\^[0-9]+\^", text) and not re.search(r"\^[0-9][0-9]+", text)


def _with_letters(tree: Tree) -> Tree:
    """The tree with i and e as letters: sympy's reader knows the constants by their capitals only."""
    if tree in (("const", "i"), ("const", "e")):
        return ("sym", tree[1])
    return (tree[0], *(_with_letters(part) if isinstance(part, tuple) else part for part in tree[1:]))


def _same_formula(gold: str, answer: str) -> bool:
    if not _allowed(f"({gold})-({answer})"):
        return False

    def undecided(left: str, right: str) -> bool:
        raise Undecided

    try:
        texts = normalise(gold), normalise(answer)
        for text in texts:
            check_shape(text)
        trees = [_with_letters(read(tokenise(text))) for text in texts]
        return same_value(trees[0], trees[1], Fraction(1), Context(gold, answer, _EXACT, undecided))
    except (Unreadable, Undecided, LimitExceeded, GoldLimit):
        return False


def sympy_equal(answer: str, gold: str) -> bool:
    """The verdict of the original's comparison by sympy."""
    left, right = spelling(gold), spelling(answer)
    if left == right:
        return True
    if not right:
        return False
    wanted, given = _members(left), _members(right)
    if len(wanted) > 1 and (left[0] != right[0] or left[-1] != right[-1]):
        return False
    if len(wanted) != len(given):
        return False
    for one, other in zip(wanted, given, strict=True):
        if _FRACTION.fullmatch(one) and _FRACTION.fullmatch(other):
            if one != other:
                return False
        elif _is_whole(one) != _is_whole(other) or not _same_formula(one, other):
            return False
    return True
