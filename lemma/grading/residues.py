"""Residue classes: `n \\equiv 3 \\pmod 7`, 7k + 3, "numbers that leave a remainder of 3 when divided by 7"."""

from __future__ import annotations

import re
from functools import lru_cache
from math import lcm
from typing import NamedTuple

from lemma.grading.tokens import name_set

_LARGEST = 10**6
_MOST = 2_000
_INTEGER = r"-?\d{1,9}"
_LETTER = r"(?:\\?[A-Za-z])"

_MODULUS = re.compile(
    rf"\s*\(?\s*(?:\\pmod|\\mod|\\bmod|(?<![a-z])modulo|(?<![a-z])mod)\s*\(?\s*\{{?\s*({_INTEGER})\s*\}}?\s*\)?\s*\)?",
    re.IGNORECASE,
)
_ANY_MODULUS = re.compile(
    r"(?<=\S)\s*(?:\\pmod\s*(?:\{[^{}]*\}|\w+)|\(\s*(?:\\b?mod|\\text\{\s*mod\s*\}|mod)\s*\w+\s*\)"
    r"|\\text\{\s*\(?\s*mod(?:ulo)?\s*\w+\s*\)?\s*\})$"
)
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_NOT = re.compile(r"\bnot\b|\\not|\\ne\b|≢|\bno\b|\bexcept\b", re.IGNORECASE)
_OR = re.compile(r"\s*(?:,|;|\bor\b|\band\b|\\lor\b|\\vee\b)\s*")
_HEAD = re.compile(rf"^.*(?:\\equiv|=|congruent to|equal to|remainder of|remainder)\s*(?=[\\\d+-])|^{_LETTER}\s+is\s+")
_LINEAR = re.compile(
    rf"^(?:{_LETTER}\s*=\s*)?(?:(?P<first>{_INTEGER})\s*\+\s*)?(?P<step>\d{{1,7}})\s*(?:\\cdot\s*)?(?P<letter>[a-hj-w])"
    r"(?:\s*(?P<sign>[+-])\s*(?P<rest>\d{1,9}))?$"
)
_FORM = "of the form"
_SUBJECTS = name_set("all the numbers integers positive natural whole is are of that which a number an integer")
_REMAINDER = re.compile(
    rf"remainders?\s+(?:of\s+|is\s+)?(?P<first>{_INTEGER}(?:\s*(?:,|or|and)\s*{_INTEGER})*)\s+(?:when|on|after|if|upon)\s+"
    rf"(?:\w+\s+|it is\s+)?(?:divided|division|dividing)\s+by\s+(?P<modulus>{_INTEGER})$"
)
_SUBJECT = rf"^(?:(?:all|the|set of|those|any|every|positive|natural|whole|integers?|numbers?|values? of|{_LETTER}|is|are|that|which|must be|a|be|such that|for)(?![a-z])[\s:,]*)*"  # noqa: E501
_MULTIPLE = re.compile(r"(?:multiples? of|divisible by)\s*(?P<modulus>\d{1,7})$")
_DIVIDES = re.compile(r"^(?P<modulus>\d{1,7})\s*\|\s*[a-z]$")
_PARITY = re.compile(r"(?P<parity>odd|even)(?:\s+(?:positive|natural|whole|integers?|numbers?|[a-z]))*$")


class Residues(NamedTuple):
    """The whole numbers with these remainders. A bare 7k + 3 may also be meant as a formula."""

    modulus: int
    members: frozenset[int]
    formula: bool = False


@lru_cache(maxsize=4096)
def read_residues(text: str) -> Residues | None:
    """The residue classes that a normalised text names, or None."""
    if len(text) > 200 or not any(c.isdigit() or c in "oOeE" for c in text):
        return None
    plain = _TEXT.sub(r" \1 ", text).replace("\\{", " ").replace("\\}", " ").strip(" .")
    plain = re.sub(r"\s+", " ", plain)
    if _NOT.search(plain):
        return None
    plain = re.sub(rf"^{_LETTER}\s*(?:\||:)\s*(?={_LETTER}\s*(?:\\equiv|=))", "", plain)
    return _by_modulus(plain) or _formulas(plain) or _in_words(plain.lower())


def same_residues(gold: Residues, answer: Residues) -> bool:
    modulus = lcm(gold.modulus, answer.modulus)
    if modulus == gold.modulus == answer.modulus:
        return gold.members == answer.members
    if modulus > _LARGEST or any(modulus // r.modulus * len(r.members) > _MOST for r in (gold, answer)):
        return False
    left, right = (
        {m + step * r.modulus for m in r.members for step in range(modulus // r.modulus)} for r in (gold, answer)
    )
    return left == right


def _by_modulus(text: str) -> Residues | None:
    """Heads and moduli in turn, `n \\equiv 1 \\pmod 5 or n \\equiv 4 \\pmod 5`; the last modulus ends the text."""
    residues: Residues | None = None
    place = 0
    for match in _MODULUS.finditer(text):
        members = _integers(text[place : match.start()])
        part = _classes(members, int(match[1]))
        if part is None or (residues is not None and residues.modulus != part.modulus):
            return None
        residues = part if residues is None else Residues(residues.modulus, residues.members | part.members)
        place = match.end()
    return residues if place and not text[place:].strip(" .)") else None


def _integers(text: str) -> list[int] | None:
    r"""The whole numbers at the ends of a text's parts: `n \equiv 1 or 4`."""
    members: list[int] = []
    for part in filter(None, _OR.split(text)):
        signed = re.fullmatch(rf"(\\pm\s*)?({_INTEGER})", _HEAD.sub("", part).strip(" ("))
        if signed is None:
            return None
        value = int(signed[2])
        members += [value, -value] if signed[1] else [value]
    return members


def _classes(members: list[int] | None, modulus: int) -> Residues | None:
    modulus = abs(modulus)
    if not members or not 2 <= modulus <= _LARGEST:
        return None
    return Residues(modulus, frozenset(member % modulus for member in members))


def _formulas(text: str) -> Residues | None:
    """7k + 3, n = 7k + 3, "all n of the form 5k + 1 or 5k + 4"."""
    head, said, form = text.partition(_FORM)
    if said and not all(len(word) == 1 or word in _SUBJECTS for word in head.replace(",", " ").split()):
        return None
    moduli, members = set(), []
    for part in _OR.split(form.strip() if said else text):
        part = re.sub(rf"^(?:for|where|{_LETTER}\s*\\in\s*\\mathbb\s*\{{?[ZN]\}}?).*$", "", part).strip()
        if not part:
            continue
        linear = _LINEAR.match(part)
        if linear is None or (linear["first"] and linear["rest"]):
            return None
        moduli.add(int(linear["step"]))
        rest = int(linear["rest"] or 0) * (-1 if linear["sign"] == "-" else 1)
        members.append(int(linear["first"] or 0) + rest)
    if len(moduli) != 1:
        return None
    residues = _classes(members, moduli.pop())
    return residues if said or residues is None else residues._replace(formula=True)


def _in_words(text: str) -> Residues | None:
    remainder = _REMAINDER.search(text)
    if remainder:
        values = [int(v) for v in re.findall(_INTEGER, remainder["first"])]
        return _classes(values, int(remainder["modulus"]))
    divides = _DIVIDES.match(text)
    if divides:
        return _classes([0], int(divides["modulus"]))
    rest = re.sub(_SUBJECT, "", text)
    multiple = _MULTIPLE.match(rest)
    if multiple:
        return _classes([0], int(multiple["modulus"]))
    parity = _PARITY.match(rest)
    return _classes([1 if parity["parity"] == "odd" else 0], 2) if parity else None


def without_modulus(text: str) -> str:
    """The text without the modulus at its end; its equations are then congruences."""
    shorter = _ANY_MODULUS.sub("", text)
    if shorter == text or not shorter:
        return text
    return shorter.replace("=", "\\equiv ")


def holds(text: str) -> bool:
    """Whether the numbers of a congruence, 17 = 2 (mod 5), are congruent; anything with other parts is taken to
    hold."""
    moduli = list(_MODULUS.finditer(text))
    if not moduli or not int(moduli[-1][1]):
        return True
    match = moduli[-1]
    sides = re.split(r"\\equiv|=", text[: match.start()])
    numbers = [int(side) for side in sides if re.fullmatch(rf"\s*{_INTEGER}\s*", side)]
    return len({number % int(match[1]) for number in numbers}) < 2
