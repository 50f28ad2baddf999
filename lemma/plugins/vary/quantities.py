"""Numbers written in words, and constants that go with units: these stay fixed when the figures change."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache

NUMBER_WORDS = {
    **{"zero": 0, "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9},
    **{"ten": 10, "eleven": 11, "twelve": 12, "thirteen": 13, "fourteen": 14, "fifteen": 15, "sixteen": 16},
    **{"seventeen": 17, "eighteen": 18, "nineteen": 19, "twenty": 20, "thirty": 30, "forty": 40, "fifty": 50},
    **{"sixty": 60, "seventy": 70, "eighty": 80, "ninety": 90},
}
SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6}
PARTS = {
    **{"half": 2, "halve": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7},
    **{"eighth": 8, "ninth": 9, "tenth": 10, "eleventh": 11, "twelfth": 12, "thirteenth": 13},
}
"""Fractions, and ordinal numbers."""

CONSTANTS: dict[str, tuple[str, ...]] = {
    "second": ("60",), "minute": ("60", "3600"), "hour": ("60", "24", "3600"), "day": ("24", "7", "365", "30"),
    "week": ("7", "52", "4"), "weekly": ("7", "52", "4"), "weekday": ("5",), "weekend": ("2",),
    "daily": ("7", "30", "365"), "month": ("12", "30", "4"), "monthly": ("12",), "year": ("12", "52", "365"),
    "annual": ("12", "52", "365"), "annually": ("12", "52", "365"), "yearly": ("12", "52", "365"), "decade": ("10",),
    "century": ("100",), "quarter": ("4", "0.25", "25", "3"), "half": ("2", "0.5", "50"), "halve": ("2", "0.5"),
    "twice": ("2",), "double": ("2",), "thrice": ("3",), "triple": ("3",), "quadruple": ("4",), "both": ("2",),
    "pair": ("2",), "couple": ("2",), "twin": ("2",), "triplet": ("3",), "dozen": ("12",), "score": ("20",),
    "percent": ("100", "0.01", "1"), "percentage": ("100", "0.01", "1"), "cent": ("100", "0.01"), "dollar": ("100",),
    "penny": ("1", "100", "0.01"), "pennies": ("1", "100", "0.01"), "nickel": ("5", "0.05", "20"),
    "dime": ("10", "0.1"), "inch": ("12", "36"), "inches": ("12", "36"), "foot": ("12", "3"), "feet": ("12", "3"),
    "yard": ("3", "36"), "mile": ("5280", "1760"), "ounce": ("16", "8", "128", "32"), "pound": ("16", "2000"),
    "ton": ("2000", "1000"), "gallon": ("4", "8", "16", "128"), "quart": ("4", "2", "32"), "pint": ("2", "8", "16"),
    "cup": ("8", "16"), "gram": ("1000",), "kilogram": ("1000",), "kg": ("1000",), "km": ("1000",),
    "kilometer": ("1000",), "meter": ("100", "1000"), "cm": ("100",), "centimeter": ("100",), "liter": ("1000",),
    "ml": ("1000",), "square": ("4", "2"), "rectangle": ("2", "4"), "rectangular": ("2", "4"),
    "perimeter": ("2", "4"), "triangle": ("3", "2"), "cube": ("6", "3"), "round": ("2",), "roundtrip": ("2",),
    "tricycle": ("3",), "bicycle": ("2",), "himself": ("1",), "herself": ("1",), "themselves": ("1",),
    "single": ("1",), "once": ("1",), "deck": ("52",), "leap": ("366",), "january": ("31",),
    "february": ("28", "29"), "march": ("31",), "april": ("30",), "may": ("31",), "june": ("30",), "july": ("31",),
    "august": ("31",), "september": ("30",), "october": ("31",), "november": ("30",), "december": ("31",),
}  # fmt: skip

WORD = re.compile(r"[a-z]+")
COUNTED = re.compile(rf"\b(?:{'|'.join(sorted([*NUMBER_WORDS, *SCALES], key=len, reverse=True))})\b")
SHARE = re.compile(rf"\b(one|two|three|four|five|six|seven|eight|nine|ten)[ -]({'|'.join(PARTS)}|halve)s?\b")
AND_A = re.compile(r"\b([a-z]+) and (?:a|one)[ -](half|quarter|third)\b")


@lru_cache(maxsize=4096)
def _constants_of(word: str) -> tuple[Fraction, ...]:
    numbers = CONSTANTS.get(word) or CONSTANTS.get(word.removesuffix("s")) or ()
    part = PARTS.get(word) or PARTS.get(word.removesuffix("s"))
    return (*map(Fraction, numbers), *((Fraction(part),) if part else ()))


def counted(text: str) -> set[Fraction]:
    """The numbers that a text spells out: each word alone, and adjacent words together."""
    low = text.lower()
    values: set[Fraction] = set()
    run: list[str] = []
    end = 0
    for match in COUNTED.finditer(low):
        if run and low[end : match.start()].strip(" -") not in ("", "and"):
            values.add(_joined(run))
            run = []
        run.append(match[0])
        end = match.end()
        if match[0] in NUMBER_WORDS:
            values.add(Fraction(NUMBER_WORDS[match[0]]))
    return values | ({_joined(run)} if run else set())


def _joined(words: list[str]) -> Fraction:
    total = 0
    for word in words:
        total = max(total, 1) * SCALES[word] if word in SCALES else total + NUMBER_WORDS[word]
    return Fraction(total)


def unit_constants(text: str) -> set[Fraction]:
    """The constants that go with the words of a text, such as 60 with minutes."""
    values = {value for word in set(WORD.findall(text.lower())) for value in _constants_of(word)}
    return values | {Fraction(100), Fraction(1), Fraction(1, 100)} if "%" in text else values


def constants(text: str) -> set[Fraction]:
    """Every value that a text implies without a figure: number words, fractions, and constants of its units."""
    low = text.lower()
    values = counted(low) | unit_constants(low)
    for count, name in SHARE.findall(low):
        values |= shares(NUMBER_WORDS[count], PARTS[name])
    for count, name in AND_A.findall(low):
        values.add(NUMBER_WORDS.get(count, 1) + Fraction(1, PARTS[name]))
    return values


def shares(part: int, whole: int) -> set[Fraction]:
    """The numbers that go with a fraction of something, and with what is left of it."""
    if not whole:
        return set()
    share = Fraction(part, whole)
    return {Fraction(part), Fraction(whole), Fraction(whole - part), share, 1 - share, Fraction(1)}
