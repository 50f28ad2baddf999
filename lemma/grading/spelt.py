"""Numbers in words: twenty-five, two thirds, a dozen; 三十六, 三分之二."""

from __future__ import annotations

import re
from fractions import Fraction

from lemma.grading.normal_form import words
from lemma.grading.tokens import names

_SMALL = {
    word: value
    for value, word in enumerate(
        names(
            """
        zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
        seventeen eighteen nineteen
        """
        )
    )
}
_TENS = {word: 10 * n for n, word in enumerate(names("twenty thirty forty fifty sixty seventy eighty ninety"), start=2)}
_BIG = {"dozen": 12, "thousand": 1000, "million": 10**6, "billion": 10**9}
_PARTS = {"half": 2, "third": 3, "thirds": 3, "quarter": 4, "quarters": 4, "fourth": 4, "fourths": 4, "fifth": 5,
          "fifths": 5, "sixth": 6, "sixths": 6, "eighth": 8, "eighths": 8, "tenth": 10, "tenths": 10}  # fmt: skip


def spelt_number(text: str) -> Fraction | None:
    """The value of a number in English words or Chinese numerals."""
    if not text.isascii():
        return _chinese(text)
    parts = [w for w in words(text).casefold().replace("-", " ").split() if w not in ("and", "a", "an")]
    if not parts or len(parts) > 12:
        return None
    if parts[-1] in _PARTS and len(parts) <= 2:
        top = 1 if len(parts) == 1 else _SMALL.get(parts[0])
        return None if top is None else Fraction(top, _PARTS[parts[-1]])
    total, current = 0, 0
    for part in parts:
        if part in _SMALL:
            current += _SMALL[part]
        elif part in _TENS:
            current += _TENS[part]
        elif part == "hundred":
            current = (current or 1) * 100
        elif part in _BIG:
            total, current = total + (current or 1) * _BIG[part], 0
        elif part.isdigit() and len(part) < 20 and current == 0:
            current = int(part)
        else:
            return None
    return Fraction(total + current)


_DIGITS = {**{c: n for n, c in enumerate("零一二三四五六七八九")}, "两": 2, "兩": 2, "〇": 0}
_PLACES = {"十": 10, "百": 100, "千": 1000}
_NUMERAL = f"[{''.join(_DIGITS)}十百千万]"
CHINESE_FRACTION = f"{_NUMERAL}{{1,12}}分之{_NUMERAL}{{1,12}}"
_CHINESE = re.compile(rf"(负?)({_NUMERAL}{{1,12}})(?:分之({_NUMERAL}{{1,12}}))?")


def _chinese(text: str) -> Fraction | None:
    found = _CHINESE.fullmatch(text.replace(" ", "").strip(".。"))
    if found is None:
        return None
    size = Fraction(_whole(found[3]), _whole(found[2]) or 1) if found[3] else Fraction(_whole(found[2]))
    return -size if found[1] else size


def _whole(numeral: str) -> int:
    if all(c in _DIGITS for c in numeral):
        return int("".join(str(_DIGITS[c]) for c in numeral))
    total, section, digit = 0, 0, 0
    for c in numeral:
        if c in _DIGITS:
            digit = _DIGITS[c]
        elif c == "万":
            total, section, digit = (section + digit) * 10_000, 0, 0
        else:
            section, digit = section + (digit or 1) * _PLACES[c], 0
    return total + section + digit
