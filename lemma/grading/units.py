"""Words after a number: units that can be compared and converted, and things that are merely counted.

A lone letter is a unit only inside a text command: in `5 m` the m may be a variable, in `5\\text{ m}` it cannot.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

from lemma.grading.tokens import Token, name_set

_LENGTH = {"mm": "1/1000", "cm": "1/100", "dm": "1/10", "m": "1", "km": "1000", "in": "127/5000", "ft": "381/1250",
           "yd": "1143/1250", "mi": "201168/125"}  # fmt: skip
_MASS = {"mg": "1/1000000", "g": "1/1000", "kg": "1", "lb": "45359237/100000000", "oz": "45359237/1600000000",
         "tonne": "1000"}  # fmt: skip
_TIME = {"ms": "1/1000", "s": "1", "min": "60", "h": "3600", "day": "86400", "week": "604800"}
_VOLUME = {"ml": "1/1000000", "cl": "1/100000", "l": "1/1000"}
_ENERGY = {"j": "1", "kj": "1000"}
_MONEY = {"dollar": "1", "cent": "1/100"}

_TABLE: dict[str, tuple[tuple[str, int], Fraction]] = {}
for _name, _units in {"length": _LENGTH, "mass": _MASS, "time": _TIME, "energy": _ENERGY, "money": _MONEY}.items():
    _TABLE.update({unit: ((_name, 1), Fraction(size)) for unit, size in _units.items()})
_TABLE.update({unit: (("length", 3), Fraction(size)) for unit, size in _VOLUME.items()})

_SAME = {
    "millimeter": "mm", "millimetre": "mm", "centimeter": "cm", "centimetre": "cm", "decimeter": "dm",
    "decimetre": "dm", "meter": "m", "metre": "m", "kilometer": "km", "kilometre": "km", "kms": "km", "inch": "in",
    "inches": "in", "foot": "ft", "feet": "ft", "yard": "yd", "mile": "mi", "gram": "g", "kilogram": "kg",
    "kilo": "kg", "kgs": "kg", "milligram": "mg", "pound": "lb", "lbs": "lb", "ounce": "oz", "ton": "tonne",
    "second": "s", "sec": "s", "secs": "s", "minute": "min", "mins": "min", "hour": "h", "hr": "h", "hrs": "h",
    "liter": "l", "litre": "l", "milliliter": "ml", "millilitre": "ml", "joule": "j", "buck": "dollar",
    "usd": "dollar", "penny": "cent", "pennies": "cent", "mph": "mi/h", "kmh": "km/h", "kph": "km/h", "kmph": "km/h",
}  # fmt: skip

# Words next to a number that mean more than a unit; the answer is then not just the number.
_MEANINGFUL = name_set(
    """
        or and to wrong incorrect false more less than least most over under below about plus minus not no if
        when for where otherwise
        any every except between from unless squared cubed mod modulo base with infinite infinitely none
        third th st nd rd but isn't divided by other half quarter double twice factorial percent loss
        halves thirds fourths quarters fifths sixths sevenths eighths ninths tenths tenth hundredths hundredth
        thousandths thousandth zero one two three four five six seven eight nine ten eleven twelve thirteen
        twenty thirty forty fifty sixty seventy eighty ninety
        """
)
_IGNORED = frozenset({"per", "square", "cubic", "sq", "cu", "units", "unit", "the", "a", "total", "approximately"})


class Unit(NamedTuple):
    """A dimension (or the name of what is counted) and its size in base units."""

    dimension: tuple[tuple[str, int], ...] | str
    size: Fraction


CENT = Unit((("money", 1),), Fraction(1, 100))
COUNTED = Unit("", Fraction(1))


def _singular(word: str) -> str:
    if word in _SAME or word in _TABLE:
        return word
    for ending, kept in (("ies", "y"), ("sses", "ss"), ("ches", "ch"), ("s", "")):
        if word.endswith(ending) and len(word) > len(ending) + 1:
            return word[: -len(ending)] + kept
    return word


def known(word: str) -> bool:
    """Whether a plain word of two letters or more is the name of a unit."""
    word = _singular(word.lower())
    return len(word) > 1 and (word in _TABLE or word in _SAME)


def read_unit(parts: list[str]) -> Unit | None:
    """The unit that these words, `^2`, `^3` and `/` spell; None if they are not a unit."""
    dimension: dict[str, int] = {}
    size, sign, pending = Fraction(1), 1, 1
    counted = False
    for part in parts:
        word = part.lower().strip(".,")
        if word in ("/", "per"):
            sign = -1
            continue
        if word in ("square", "sq"):
            pending = 2
            continue
        if word in ("cubic", "cu"):
            pending = 3
            continue
        if not word or word in _IGNORED or word in ("*",):
            counted = True
            continue
        if word in _MEANINGFUL:
            return None
        if not word.replace("^", "").replace("-", "").replace("'", "").isalnum():
            return None
        name, _, exponent = word.partition("^")
        if exponent and not exponent.lstrip("-").isdigit():
            return None
        power = sign * (int(exponent[:3]) if exponent else pending)
        pending = 1
        name = _singular(name)
        name = _SAME.get(name, name)
        for step, unit in enumerate(name.split("/") if "/" in name else [name]):
            if unit not in _TABLE:
                counted = True
                continue
            (base, degree), scale = _TABLE[unit]
            direction = power if step == 0 else -power
            dimension[base] = dimension.get(base, 0) + degree * direction
            size *= scale**direction
    first = parts[0].lower().partition("^")[0] if parts else ""
    if not dimension or (counted and (sign < 0 or not known(first))):
        return COUNTED
    return Unit(tuple(sorted((k, v) for k, v in dimension.items() if v)), size)


def conversion(gold: Unit | None, answer: Unit | None) -> Fraction | None:
    """Factor that converts the answer to the gold's unit; None if the two cannot be the same quantity."""
    if gold is None or answer is None or COUNTED in (gold, answer):
        return Fraction(1)
    if gold.dimension != answer.dimension:
        return None
    return answer.size / gold.size


_PART = r"(\d+(?:\.\d+)?) ?(?:\\text ?\{ ?)?([A-Za-z]+)\.? ?\}?"
_NEXT = rf"(?: ?,)? ?(?:(?:\\text ?\{{ ?)?and ?\}}? ?)?{_PART}"
_COMPOUND = re.compile(rf"{_PART}(?:{_NEXT}){{1,3}}")
_EACH = re.compile(_PART)


def in_one_unit(text: str) -> str:
    """2 hours 15 minutes, 5 ft 6 in: a quantity told in units that get smaller, in the first of them."""
    if _COMPOUND.fullmatch(text) is None:
        return text
    found = _EACH.findall(text)
    units = [read_unit([{"m": "min"}.get(word, word) if found[0][1][0] in "hd" else word]) for _, word in found]
    sizes = [unit.size for unit in units if unit is not None]
    dimensions = {unit.dimension if unit else "" for unit in units}
    if len(dimensions) > 1 or COUNTED.dimension in dimensions or sizes != sorted(set(sizes), reverse=True):
        return text
    total = sum(Fraction(value) * size for (value, _), size in zip(found, sizes, strict=True)) / sizes[0]
    return f"\\frac{{{total.numerator}}}{{{total.denominator}}}\\text{{ {found[0][1]}}}"


Tokens = tuple[Token, ...]


def has_words(tokens: Tokens) -> bool:
    """Whether there are words before a number or inside it, other than those that scale it."""
    return any(t.kind == "word" and len(t.value) > 3 and t.value.lower() not in _SCALE_WORDS for t in tokens)


def unit_parts(tokens: Tokens) -> tuple[int, list[str]]:
    """Where the trailing words begin, and these words with their powers and slashes."""
    end = len(tokens)
    parts: list[str] = []
    while end > 1:
        token = tokens[end - 1]
        before = tuple(t.kind for t in tokens[max(0, end - 5) : end - 1])
        if token.kind == "text":
            parts = [*token.value.strip("()").replace("/", " / ").split(), *parts]
        elif token.kind == "word" and _may_be_unit(token.value, bool(parts)):
            parts = [token.value, *parts]
        elif token.kind == ")" and not parts and (inside := _words_in_brackets(tokens[:end])):
            parts, end = inside, end - len(inside) - 1
        elif token.kind == "num" and before[-1:] == ("^",) and before[-2:-1] in (("text",), ("word",)):
            parts, end = ["^" + token.value, *parts], end - 1
        elif token.kind == "}" and before[1:] == ("^", "{", "num") and before[0] in ("text", "word"):
            parts, end = ["^" + tokens[end - 2].value, *parts], end - 3
        elif token.kind == "/" and parts:
            parts = ["/", *parts]
        elif token.kind == "id" and _letter_of_rate(parts, before):
            parts = [token.value, *parts]
        else:
            break
        end -= 1
    return (end, parts) if not parts or parts[0][0] != "^" else (len(tokens), [])


def _words_in_brackets(tokens: Tokens) -> list[str]:
    """The words of a pair of brackets at the end that holds nothing else: 12 (apples)."""
    opening = max((i for i, t in enumerate(tokens) if t.kind == "("), default=0)
    inside = tokens[opening + 1 : -1]
    plain = opening > 0 and all(t.kind == "word" and len(t.value) > 3 for t in inside)
    return [t.value for t in inside] if plain else []


def _letter_of_rate(parts: list[str], before: tuple[str, ...]) -> bool:
    """A letter in 5 m/s, on either side of the slash, if the other side is a unit."""
    if parts[:1] == ["/"]:
        return before[-1:] == ("num",)
    return before[-1:] == ("/",) and before[-2:-1] in (("text",), ("word",))


_LITTLE_WORDS = name_set("of in at on is by per sq cu")
_SHORT_WORDS = name_set("all old the are was cup men way pie egg box bag")


def _may_be_unit(word: str, has_more: bool) -> bool:
    """Plain words of three letters or fewer are products of letters unless they are known units or little words."""
    little = word in _SHORT_WORDS or (has_more and word in _LITTLE_WORDS)
    return (len(word) > 3 or known(word) or little) and word.lower() not in _NO_UNITS


_SCALE_WORDS = frozenset({"hundred", "thousand", "million", "billion", "trillion", "dozen"})


_NO_UNITS = _SCALE_WORDS | name_set("not wrong incorrect false fails cannot")


def attach_powers(parts: list[str]) -> list[str]:
    out: list[str] = []
    for part in parts:
        if part.startswith("^") and out:
            out[-1] += part
        else:
            out.append(part)
    return out
