"""Yes and no: what a text says first or last, where the gold is one of the two."""

from __future__ import annotations

import re

_WORDS = (
    "yes|true|correct|oui|vrai|ja|wahr|richtig|sí|verdadero|sì|vero|sim|да|верно|是|是的|对|正确|はい|예|네|نعم|हाँ|हां",
    "no|false|incorrect|non|faux|nein|falsch|falso|não|нет|неверно|否|不是|不|错误|いいえ|아니요|아니오|لا|नहीं",
)
_SAID = re.compile(
    rf"(?:so|thus|hence|therefore)?\W*(?:(?P<yes>{_WORDS[0]})|(?P<no>{_WORDS[1]}))(?=\W*$|\**\s*[,.!;:،，。！—–-]|\s+(?:because|since|as)\b)",
    re.IGNORECASE,
)
_JUDGED = re.compile(
    r"\b(?:is|are)\s+(?:(?:also|indeed|clearly|therefore|always)\s+)?(?P<not>not\s+)?(?:(?P<yes>true|correct)|(?P<no>false|incorrect))\W*$",
    re.IGNORECASE,
)
_GOLD = re.compile(r"\W*(?:\\text\s*\{)?\s*(?:(?P<yes>yes|true)|(?P<no>no|false))\W*", re.IGNORECASE)
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}")
_END = re.compile(r"(?<=[.!?。！])\s+|\n+")


def asked(gold: str) -> bool | None:
    """True and False for the golds yes and no; None for any other."""
    said = _GOLD.fullmatch(gold) if len(gold) < 40 else None
    return None if said is None else said["yes"] is not None


def said(text: str) -> bool | None:
    """Whether a text says yes, or no, or neither: in its last sentence, or with its first word."""
    sentences = [s for s in _END.split(_TEXT.sub(r"\1", text[-2_000:]).strip()) if s.strip()]
    for sentence in (sentences[-1:] + sentences[:1]) if sentences else ():
        first, judged = _SAID.match(sentence.strip(" *$")), _JUDGED.search(sentence)
        if first is not None:
            return first["yes"] is not None
        if judged is not None:
            return (judged["yes"] is not None) != (judged["not"] is not None)
    return None
