"""Sets of numbers told in words: between 2 and 5, inclusive; x greater than 6; all real numbers except 3."""

from __future__ import annotations

import re

from lemma.grading.lexer import Lexeme
from lemma.grading.objects import Stated, is_light

_NUMBER = (
    r"\$?\s*([-−–]?\s?(?:\d+(?:[.,/]\d+)*|\\[dt]?frac\{\d+\}\{\d+\}|\\infty|∞|infinity))\s*\$?(?![\w^!/*+(√π])(?!\s*\\)"
)
_BETWEEN = re.compile(
    rf"(?:between|from)\s+{_NUMBER}\s+(?:and|to)\s+{_NUMBER}"
    r"(?:,?\s*\(?\s*((?:both\s+)?inclusive|exclusive|both included)\b\)?)?"
)
_SIGNS = {
    "greater than or equal to": ">=",
    "less than or equal to": "<=",
    "greater than": ">",
    "larger than": ">",
    "bigger than": ">",
    "more than": ">",
    "less than": "<",
    "smaller than": "<",
    "no more than": "<=",
    "no less than": ">=",
    "at least": ">=",
    "at most": "<=",
}
_BOUND = rf"(?:strictly\s+)?({'|'.join(_SIGNS)})\s+{_NUMBER}"
_BOUNDED = re.compile(
    r"(?:\$?([B-HJ-Zb-z])\$?|real numbers|reals)\s+(?:(is|must be|has to be|should be|can be|are|be)\s+)?"
    rf"{_BOUND}(?:,?\s+(?:and|but)\s+(?:(?:is|are)\s+)?{_BOUND})?"
)
_EXCEPT = re.compile(rf"(?:except(?:\s+for)?|excluding)\s+\$?(?:[A-Za-z]\s*=\s*)?{_NUMBER}")
_OVER = frozenset(
    {"all", "every", "any", "real", "numbers", "values", "x", "n", "t", "lies", "lie", "anywhere", "strictly"}
)


def read_condition(tokens: list[Lexeme], place: int, text: str) -> tuple[Stated, bool] | None:
    """The set of numbers that the words at a token tell, and whether a verb leads to it."""
    token = tokens[place]
    low = token.text.lower()
    if low in ("between", "from"):
        found = _BETWEEN.match(text, token.start)
        return found and _range(tokens, place, found)
    if low in ("except", "excluding"):
        found = _EXCEPT.match(text, token.start)
        if found is None or not any(t.text.lower() in ("real", "reals") for t in tokens[:place]):
            return None
        return _told(tokens, place, found.end(), rf"\mathbb{{R}} \setminus \{{{found[1]}\}}"), True
    if len(token.text) != 1 and low not in ("real", "reals"):
        return None
    found = _BOUNDED.match(text, token.start)
    if found is None:
        return None
    name = found[1] or "x"
    said = name + _SIGNS[found[3]] + found[4]
    if found[5]:
        said += rf" \text{{ and }} {name}{_SIGNS[found[5]]}{found[6]}"
    return _told(tokens, place, found.end(), said), bool(found[2])


def _range(tokens: list[Lexeme], place: int, found: re.Match[str]) -> tuple[Stated, bool]:
    before = place - 1
    strict = place > 0 and tokens[before].text.lower() == "strictly"
    while before >= 0 and (
        tokens[before].kind == "mark" or tokens[before].text.lower() in _OVER or is_light(tokens[before])
    ):
        before -= 1
    said = f"{found[1]} to {found[2]}"
    if found[3] or strict:
        said = f"({found[1]}, {found[2]})" if strict or found[3] == "exclusive" else f"[{found[1]}, {found[2]}]"
    leads = before >= 0 and "be" in tokens[before].parts
    return _told(tokens, place, found.end(), said), leads or any(t.text.lower() == "all" for t in tokens[:place])


def _told(tokens: list[Lexeme], place: int, end: int, said: str) -> Stated:
    after = next((i for i in range(place, len(tokens)) if tokens[i].start >= end), len(tokens))
    return Stated(said, after, "math")
