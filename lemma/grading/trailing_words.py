"""The words at the end of an expression, which may be its unit or what is counted."""

from __future__ import annotations

from lemma.grading.names import names
from lemma.grading.tokens import Token
from lemma.grading.units import known

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
            parts = [*token.value.replace("/", " / ").split(), *parts]
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
    return end, parts


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


_LITTLE_WORDS = frozenset(names("of in at on is by per sq cu"))
_SHORT_WORDS = frozenset(names("all old the are was cup men way pie egg box bag"))


def _may_be_unit(word: str, has_more: bool) -> bool:
    """Plain words of three letters or fewer are products of letters unless they are known units or little words."""
    little = word in _SHORT_WORDS or (has_more and word in _LITTLE_WORDS)
    return (len(word) > 3 or known(word) or little) and word.lower() not in _NO_UNITS


_SCALE_WORDS = frozenset({"hundred", "thousand", "million", "billion", "trillion", "dozen"})


_NO_UNITS = _SCALE_WORDS | frozenset(names("not wrong incorrect false fails cannot"))


def attach_powers(parts: list[str]) -> list[str]:
    out: list[str] = []
    for part in parts:
        if part.startswith("^") and out:
            out[-1] += part
        else:
            out.append(part)
    return out
