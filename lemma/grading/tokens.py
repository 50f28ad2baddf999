"""Tokens of a normalised answer: numbers, letters, words, commands, brackets, operators."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from lemma.grading.limits import MAX_BOX, MAX_DIGITS, MAX_TOKENS, LimitExceeded


def names(text: str) -> tuple[str, ...]:
    """The names in a text, in order."""
    return tuple(text.split())


def name_set(text: str) -> frozenset[str]:
    """The names in a text."""
    return frozenset(text.split())


FUNCTIONS = name_set(
    """
        sin cos tan cot sec csc arcsin arccos arctan arccot sinh cosh tanh coth ln log lg exp sqrt cbrt abs min
        max gcd lcm floor ceil
        """
)
CONSTANTS = frozenset({"pi", "infty"})


class Token(NamedTuple):
    """`kind` is num, id, word, text, cmd, deg, or the character itself for brackets and operators."""

    kind: str
    value: str
    start: int
    end: int


_TOKEN = re.compile(
    r"(?P<space>\s+)"
    r"|(?P<text>\\text\s*\{(?P<inside>[^{}]*)\})"
    r"|(?P<num>\d+(?:\.\d+)?(?:\.(?=\D|$)(?!\.))?|\.\d+)"
    r"|(?P<cmd>\\[A-Za-z]+)"
    r"|(?P<brace>\\[{}|])"
    r"|(?P<row>\\\\)"
    r"|(?P<word>[A-Za-z]+)"
    r"|(?P<char>.)",
    re.DOTALL,
)
_SCIENTIFIC = re.compile(r"\d+(?:\.\d+)?[eE][+-]?\d{1,5}(?![\w.])")
_THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?![\d,]?\d)")


def ambiguous(text: str) -> bool:
    """Whether commas between digits may separate thousands or members of a list."""
    return "," in text and _THOUSANDS.search(text) is not None


def join_thousands(text: str) -> str:
    return _THOUSANDS.sub(lambda m: m[0].replace(",", ""), text)


@lru_cache(maxsize=8192)
def tokenise(text: str) -> tuple[Token, ...]:
    """Split a normalised text. Refuses numbers and texts that are too long."""
    out: list[Token] = []
    place, end = 0, len(text)
    while place < end:
        if len(out) > MAX_TOKENS:
            raise LimitExceeded(f"more than {MAX_TOKENS} tokens")
        if text[place].isdigit():
            scientific = _SCIENTIFIC.match(text, place)
            if scientific:
                out.append(Token("num", scientific[0], place, scientific.end()))
                place = scientific.end()
                continue
        match = _TOKEN.match(text, place)
        assert match is not None, "the last alternative matches any character"
        kind, start = match.lastgroup or "text", place
        place = match.end()
        if kind == "space":
            continue
        if match["text"] is not None:
            if match["inside"].strip():
                out.append(Token("text", match["inside"].strip(), start, place))
            continue
        value = match[0]
        if kind == "num" and len(value) > MAX_DIGITS:
            raise LimitExceeded(f"a number of more than {MAX_DIGITS} digits")
        if kind == "cmd":
            value = value[1:]
            kind = _OPERATORS.get(value, "cmd")
        elif kind == "brace":
            kind = "|" if value == "\\|" else value
        elif kind == "word":
            kind = "id" if len(value) == 1 else "cmd" if value in FUNCTIONS or value in CONSTANTS else "word"
        elif kind == "char":
            kind = "deg" if value == "°" else value
        out.append(Token(kind, value, start, place))
    return tuple(out)


_OPERATORS = {"cdot": "*", "times": "*", "ast": "*", "le": "<=", "ge": ">=", "ne": "!="}


def spelling(tokens: tuple[Token, ...]) -> str:
    """LaTeX for these tokens; tokens that were split, renamed or given a sign are spelt as they are now."""
    out: list[str] = []
    for token in tokens:
        if token.kind == "text":
            spelt = "\\text{" + token.value + "}"
        elif token.kind == "cmd" or (token.kind in ("*", "<=", ">=", "!=") and token.value.isalpha()):
            spelt = "\\" + token.value
        else:
            spelt = token.value
        if out and out[-1][-1:].isalnum() and spelt[:1].isalnum() and (out[-1][0] == "\\" or spelt[0] != "\\"):
            out.append(" ")
        out.append(spelt)
    return "".join(out)


_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)


def closing_brace(text: str, opening: int) -> int:
    """Position of the brace that closes the one at `opening`; -1 if none does within the maximum length of a box.

    Escaped braces do not count.
    """
    depth = 0
    for mark in _BRACES.finditer(text, opening, opening + MAX_BOX):
        if mark[0] == "{":
            depth += 1
        elif mark[0] == "}":
            depth -= 1
            if depth == 0:
                return mark.start()
    return -1
