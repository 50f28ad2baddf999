"""Answers that are taken back: "Wait, that is wrong. It is 41." The last statement counts."""

from __future__ import annotations

import re

_SEARCHED = 1_500
_NOT_RIGHT = r"(?:wrong|incorrect|mistaken|not\s+(?:right|correct|true|the\s+answer)|an\s+error)"
_OTHERWISE = (
    r"isn't\s+(?:right|correct)|wasn't\s+(?:right|correct)|made\s+(?:a|an)\s+(?:\w+\s+)?(?:mistake|error)"
    r"|take\s+(?:that|it|this)\s+back|scratch\s+that|never\s*mind|on\s+second\s+thoughts?|correction\b"
)
_CUE = re.compile(
    r"\b(?:wait\b|actually\b|oops\b|sorry\b|hmm\b|no(?=[,.!:;]|\s+wait)|but\s+(?:the|my|our)\s+(?:\w+\s+)?answer\b"
    rf"|(?:is|was|seems|looks|were|are)\s+{_NOT_RIGHT}|{_OTHERWISE})|'s\s+{_NOT_RIGHT}",
    re.IGNORECASE,
)
_DENIED = re.compile(
    rf"\b(?:(?:that|this|it|which|answer|result|above|i)(?:\s+(?:is|was|were|seems|looks)|'s)\s+{_NOT_RIGHT}|{_OTHERWISE})",
    re.IGNORECASE,
)
# The answer itself is called wrong in its own sentence: \boxed{42} is wrong; not a reason: B, because (C) is wrong.
_DENIED_AT_ONCE = re.compile(
    r"(?:(?!\b(?:because|since|as|so|and|but|for)\b)[^.!?\n;]){1,80}?[\w}$)*]\s+(?:is|was)\s+" + _NOT_RIGHT,
    re.IGNORECASE,
)
_STATED = re.compile(
    r"\b(?:answer|result|solution)\b[^.\n]{0,30}?\b(?:is|are|be|equals)\b(?!\s+(?:not|wrong|incorrect|right|correct))"
    r"|\b(?:it|that|this)(?:\s+(?:is|equals|should\s+be|must\s+be|has\s+to\s+be|ought\s+to\s+be|would\s+be)|'s)"
    r"(?:\s+(?:really|actually|in\s+fact))?\s+(?=[$\\(\[*-]*\d|\$|\\[(\[])"
    r"|\bI\s+meant\b|\bcorrection\s*:|\bmake\s+(?:that|it)\b",
    re.IGNORECASE,
)
_FIGURE = re.compile(r"\d|\$|\\[(\[a-z]")
_NEGATED = re.compile(r"(?:\bnot|n't)(?:\s+(?:equal\s+to|the\s+answer))?\s*[$({\[\\]*\s*$", re.IGNORECASE)


def second_thought(text: str, place: int) -> str | None:
    """What is said instead of the answer at `place`: a text with a new one, "" for none; None if it stands.

    A doubt that leads to no other answer ("Wait, let me check") takes nothing back.
    """
    begin = max(place, len(text) - _SEARCHED)
    first = _CUE.search(text, begin)
    if first is None:
        return None
    said = list(_STATED.finditer(text, first.start()))
    statement = said[-1] if said else None
    if statement is not None and _FIGURE.search(text, statement.end()):
        return text[statement.end() :]
    denial = _DENIED.search(text, begin) or _DENIED_AT_ONCE.match(text, place)
    return "" if denial is not None and not _FIGURE.search(text, denial.end()) else None


def denied(text: str) -> bool:
    """Whether a short text only says of an answer that it is wrong: (D) is incorrect."""
    return _DENIAL.fullmatch(text) is not None


_DENIAL = re.compile(r"[^.!?\n]{1,60}?\s(?:is|was|are)\s+" + _NOT_RIGHT + r"[.!]?", re.IGNORECASE)


def negated(text: str, place: int) -> bool:
    """Whether the answer at `place` is negated: "the answer is not 42"."""
    return _NEGATED.search(text[max(0, place - 40) : place]) is not None


def doubted(text: str, place: int) -> bool:
    """Whether anything after `place` may take the answer back; a quick check."""
    return _CUE.search(text, max(place, len(text) - _SEARCHED)) is not None
