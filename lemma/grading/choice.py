"""Answers that choose: letters of options, `B`, `(B)`, `\\textbf{(B)} 4`, `B. four`; yes and no."""

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


_WORDS = (
    "yes|true|correct|oui|vrai|ja|wahr|richtig|sí|verdadero|sì|vero|sim|да|верно|是|是的|对|正确|はい|예|네|نعم|हाँ|हां",
    "no|false|incorrect|non|faux|nein|falsch|falso|não|нет|неверно|否|不是|不正确|不对|不|错误|いいえ|아니요|아니오|لا|नहीं",
)
_SAID = re.compile(
    rf"(?:so|thus|hence|therefore)?\W*(?:(?P<yes>{_WORDS[0]})|(?P<no>{_WORDS[1]}))(?=\W*$|\**\s*[,.!;:،，。！—–-]|\s+(?:because|since|as)\b)",
    re.IGNORECASE,
)
_JUDGED = re.compile(
    r"\b(?:is|are)\s+(?:(?:also|indeed|clearly|therefore|always)\s+)?(?P<not>not\s+)?(?:(?P<yes>true|correct)|(?P<no>false|incorrect))\W*$",
    re.IGNORECASE,
)
_YES_OR_NO = re.compile(r"\W*(?:\\text\s*\{)?\s*(?:(?P<yes>yes|true)|(?P<no>no|false))\W*", re.IGNORECASE)
_WRAPPED = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}")
_SENTENCE_END = re.compile(r"(?<=[.!?。！])\s+|\n+")


def yes_or_no(gold: str) -> bool | None:
    """True and False for the golds yes and no; None for any other."""
    said = _YES_OR_NO.fullmatch(gold) if len(gold) < 40 else None
    return None if said is None else said["yes"] is not None


def said_of_it(text: str) -> bool | None:
    """Whether a text says yes, or no, or neither: in its last sentence, or with its first word."""
    sentences = [s for s in _SENTENCE_END.split(_WRAPPED.sub(r"\1", text[-2_000:]).strip()) if s.strip()]
    for sentence in (sentences[-1:] + sentences[:1]) if sentences else ():
        first, judged = _SAID.match(sentence.strip(" *$")), _JUDGED.search(sentence)
        if first is not None:
            return first["yes"] is not None
        if judged is not None:
            return (judged["yes"] is not None) != (judged["not"] is not None)
    return None
