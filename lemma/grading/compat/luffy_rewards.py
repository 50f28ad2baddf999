"""LUFFY's reward versions 0 to 4, and its scores for GSM8K and MATH sources."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lemma.grading.compat.math_verify_calls import verified
from lemma.grading.compat.strings import box_content, hendrycks, hendrycks_box, hendrycks_equal, inside_text
from lemma.grading.compat.sympy_strings import sympy_equal

_OPEN, _CLOSE = "<think>", "</think>"


def _mathd_equal(answer: str, gold: str) -> bool:
    spelt = []
    for text in map(inside_text, (answer, gold)):
        try:
            spelt.append(hendrycks(text))
        except ValueError:
            spelt.append(text)
    return spelt[0] == spelt[1]


def _boxed_outcome(text: str, gold: str | Sequence[str]) -> bool | None:
    """Versions 0 to 2: None where the format is wrong or no gold is left, else whether the box is right."""
    if _OPEN not in text or _CLOSE not in text:
        return None
    answer = box_content(text.split(_CLOSE)[1])
    if answer is None:
        return None
    golds = []
    for one in [gold] if isinstance(gold, str) else gold:
        inside = box_content(one) if "\\boxed" in one else one
        if inside is not None:
            golds.append(inside)
    if not golds:
        return None
    return any(_mathd_equal(answer, one) or sympy_equal(answer, one) for one in golds)


def luffy_score(response: str, gold: str | Sequence[str], version: int = 3, compat: bool = True) -> float:
    """The score of a version. The prompt's `<think>` and a newline are put in front of all but version 4.

    `compat` keeps the original's crash on a list of golds in versions 3 and 4; without it any of them counts.
    """
    text = response if version == 4 else "<think>\n" + response
    if version in (0, 1, 2):
        outcome = _boxed_outcome(f"{_OPEN}{_CLOSE}" + text if version == 2 else text, gold)
        if version == 1:
            return -1.0 if outcome is None else 1.0 if outcome else -0.5
        return float(bool(outcome))
    if version not in (3, 4):
        raise ValueError(f"LUFFY has reward versions 0 to 4, not {version}")
    if not isinstance(gold, str):
        if compat:
            raise TypeError("LUFFY's versions 3 and 4 take one gold answer")
        return max(luffy_score(response, one, version) for one in gold)
    if version == 3:
        if _OPEN not in text or _CLOSE not in text:
            return 0.0
        text = text.split(_CLOSE)[1]
    return float(verified("$" + gold + "$", text))


def gsm8k_source(response: str, gold: str | Sequence[str]) -> float:
    """`#### number`, commas and dollar signs removed, equal as strings."""
    match = re.search(r"#### (\-?[0-9\.\,]+)", response)
    if match is None:
        return 0.0
    return float(match[0].split("#### ")[1].replace(",", "").replace("$", "") == gold)


def math_source(response: str, gold: str | Sequence[str]) -> float:
    """The last box, equal to the gold as Hendrycks strings."""
    answer = hendrycks_box(response)
    return float(answer is not None and isinstance(gold, str) and hendrycks_equal(answer, gold))
