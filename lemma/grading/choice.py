"""Letters of options: `B`, `(B)`, `\\textbf{(B)} 4`, `B. four`."""

from __future__ import annotations

import re
from typing import NamedTuple

OPTIONS = {
    letter: option for letters in ("أبجده", "कखगघ", "কখগঘ") for letter, option in zip(letters, "ABCDE", strict=False)
}
"""The letters of options in other scripts."""

_WHOLE = re.compile(r"\(?\s*([A-J])\s*[).:]?$")
_LABEL = re.compile(r"(?:\(\s*([A-J])\s*\)|([A-J])\s*[).:])(?!\s*(?:is|are|was|isn't)\b)\s*(.+)$", re.DOTALL)
_NAMED = re.compile(r"(?:option|choice|answer)?\s*\(?([A-J])\)?$", re.IGNORECASE)
_TEXT = re.compile(r"\\text\{([^{}]*)\}")


_SEVERAL = re.compile(r"\(?[A-J]\)?(?:(?:\s*(?:,|and|&)\s*|\s*)\(?[A-J]\)?){1,9}\.?$")


def several(text: str) -> frozenset[str] | None:
    """The letters of an answer that names several options: ACD, or (A), (C) and (D)."""
    plain = _TEXT.sub(r" \1 ", text).strip()
    if len(plain) > 60 or not _SEVERAL.match(plain):
        return None
    letters = [c for c in plain.replace("and", "") if c.isalpha()]
    return frozenset(letters) if len(set(letters)) == len(letters) > 1 else None


class LetterChoice(NamedTuple):
    """The letter of an option and the text after it, which may be empty."""

    letter: str
    content: str


def read_choice(text: str) -> LetterChoice | None:
    """The option that a normalised answer names, if it begins with one."""
    if not text or len(text) > 400:
        return None
    plain = _TEXT.sub(r"\1", text).strip()
    if not plain.isascii() and (letter := plain.strip("() .")) in OPTIONS:
        return LetterChoice(OPTIONS[letter], "")
    whole = _WHOLE.match(plain)
    if whole:
        return LetterChoice(whole[1], "")
    labelled = _LABEL.match(plain)
    if labelled:
        start = text.find(labelled[1] or labelled[2])
        rest = re.sub(r"^[\s).:}]+", "", text[start + 1 :])
        return LetterChoice(labelled[1] or labelled[2], rest)
    named = _NAMED.match(plain) if len(plain) < 12 and not plain.islower() else None
    if named and not plain[:1].isspace() and len(plain) > 1:
        return LetterChoice(named[1].upper(), "")
    return None
