"""Running text as tokens: formulas, values written without delimiters, letters of options, words, punctuation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from lemma.grading.choice import OPTIONS
from lemma.grading.languages import ATTACHED, FIRST_WORDS, PHRASES, TABLES, UNSPACED, language_of
from lemma.grading.spelt import CHINESE_FRACTION
from lemma.grading.tokens import name_set
from lemma.grading.units import known

MATH = re.compile(
    r"\$\$(.{1,1000}?)\$\$|\\\[(.{1,1000}?)\\\]|\\\((.{1,1000}?)\\\)|(?<![\\\d$])\$([^$\n]{1,1000}?)(?<!\\)\$",
    re.DOTALL,
)
_AMOUNT = re.compile(r"\s*\d[\d,]*(?:\.\d+)?(?=[\s.,;:!?*)])")
_WORDS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")

_LITTLE = (
    "(?:so|is|or|if|in|as|at|by|to|we|be|he|it|of|on|no|an|do|up|us|go|me|my|la|le|el|un|es|et|ou|de|se|si|en|du|il|er"
    "|zu)(?![a-z])"
)
_NUMBER = (
    r"(?:\d{1,2}(?::\d\d)?\s?[ap]\.m\.|[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?(?!\d)"
    r"|[1-9]\d{0,2}(?:[ \u00a0\u202f]\d{3})+(?![\d.,]?\d)"
    r"|\d+\s\d+[/⁄]\d+|\d+(?:[.,:/⁄∶]\d+)*|\.\d+)"
)
_ALPHA = r"[^\W\d_¹²³⁰-₉½¼¾①-⑳ℝℤℕℚ]"
_LETTER = (
    rf"(?:(?<!{_ALPHA})[A-Za-zα-ωΔΦΨΩ](?!{_ALPHA}|['’])"
    rf"|(?<!{_ALPHA})(?!{_LITTLE})[A-Za-z]{{2}}(?=\s?[-−+=^/*]\s?\w{{1,3}}(?!{_ALPHA}))"
    rf"|(?:(?<=[-−+=^/*])|(?<=[-−+=^/*]\s))(?!{_LITTLE})[A-Za-z]{{2}}(?!{_ALPHA}))"
)
_FUNCTION = (
    r"(?<![^\W\d_])(?:(?:np|numpy|math|sp)\.)?(?:pi|infinity|infty|oo|[A-Za-z]{2,8}(?=\([^()\nA-Za-z]{1,30}\))|(?:(?:arc)?(?:sin|cos|tan)h?|cot|sec|csc|sqrt|cbrt|ln|log|exp|max|min|gcd|lcm)"
    r"(?=\s?[\d(√π\\^_{₀-₉]|\s[A-Za-z](?![A-Za-z])))(?![A-Za-z])[₀-₉]*\s?"
)
_MATRIX = r"\\begin\{(?:[bpvV]?matrix|cases|array)\}[^\n]{1,400}?\\end\{\w+\}"
_SYMBOL = r"(?=[b-zB-HJ-Z](?![A-Za-z'’]))"
_COMMAND = (
    r"\\(?:[A-Za-z]+|[{}|%$,;:!]|\s)(?:\s?\[[^\]\n]{0,20}\])?"
    rf"(?:(?:\s?\{{(?:[^{{}}]|\{{(?:[^{{}}]|\{{[^{{}}]*\}})*\}})*\}})+(?: {_SYMBOL})?"
    rf"|(?<=[a-z])(?: (?=[\d(\[])| {_SYMBOL})|)"
)
_INSIDE = (
    rf"(?:(?!{_ALPHA})[^()\[\]{{}}\\\n]|{_LETTER}|(?:sqrt|pi|ln|log|sin|cos|tan|mod|infinity|infty|inf|oo)(?![A-Za-z])|{_COMMAND}"
    r"|\([^()A-Za-z\n]{0,40}\)|\{[^{}A-Za-z\n]{0,40}\}|[\^_]\{[^{}\n]{0,60}\})"
)
_BRACKET = rf"(?:[(\[]{_INSIDE}{{1,120}}[)\]]|\{{{_INSIDE}{{1,120}}\}}|\|[^|\n]{{1,40}}\|)"
_AFTER = (
    r"(?:\s?[%°‰％¢]|!(?=\s?[-+*/=×·÷^,)\]}a-z\d(.])|[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ]+|[₀-₉]+"
    r"|[\^_](?:\{(?:[^{}]|\{[^{}]*\})*\}|[-+]?(?:\d+(?:\.\d+)?|[A-Za-z])|\([^()\n]{1,60}\)))"
)
_ATOM = (
    rf"(?:(?:[$€£¥₹₽] ?)?{_NUMBER}|{_MATRIX}|[√∛]\s?(?:{_NUMBER}|{_LETTER}|{_BRACKET})|{_FUNCTION}|{_BRACKET}"
    rf"|{_COMMAND}|{_LETTER}|[π∞∅ℝℤℕℚ¼½¾⅐-⅞①-⑳]|{CHINESE_FRACTION}){_AFTER}*"
)
_OPERATOR = (
    r"(?:\s*(?:<=|>=|!=|==|[-+−–±∓/÷×·⋅∙^=<>≤≥≠≈≡∪∩∈]|(?<!\*)\*(?!\*))\s*|\s+(?:x|mod)\s+(?=[\d$€£(])|\s:\s(?=\d)"
    r"|\s(?=\\[A-Za-z%]|\(mod|i(?:[.,;)$]|\s*$)))"
)
_VALUE = re.compile(rf"(?:[-−–+±∓](?=\S)|[≈~<>≤≥≠]\s?)?{_ATOM}(?:(?:{_OPERATOR}[-−+±]?\s?)?{_ATOM})*")
_CHOICE = re.compile(
    rf"[(（]\s?([A-JАБВГДЕ{''.join(OPTIONS)}])\s?[)）]|\[\s?([A-J])\s?\]|(?:(?<=option )|(?<=choice ))\(([a-j])\)|"
    r"(?<=answer is )([a-e])\)(?=\s)|\b([A-J])['’](?=[dt][ıiuü]r\b)|"
    r"\\text(?:bf|rm)?\{\s*\(?([A-J])\)?[.:]?\s*\}(?:\\[ ,;])?"
)
_WORD = re.compile(
    rf"(?:{PHRASES})(?![^\W\d_])|(?:{ATTACHED})|[{UNSPACED}]|[^\W\d_{UNSPACED}](?:[^\W{UNSPACED}]|['’](?=\w)|[\u0300-\u036f\u0610-\u06ed"
    r"\u0900-\u0963\u0966-\u0dff]|-(?=[^\W\d_]))*[²³]?",
    re.IGNORECASE,
)
# A clause, rather than a difference: 32 - I checked it.
_DASHED = re.compile(r"\w\s-\s+[AI]$")
_IN_BASE = re.compile(r"\s\(?(?:in )?base[ -](?:\d{1,2}|[a-z]{3,8})\)?(?![\w.]\d)")
_AREA = re.compile(r"(?<=\d)\s?([mskg])([²³])$")
_TEMPERATURE = re.compile(r"(?<=\d)\s?°\s?[CF]$")
_PLAIN = re.compile(r"[A-Za-zÀ-ÿ]{3,}(?=[\s.,;:!?]|$)")
_PHRASE = re.compile(rf"(?:{PHRASES})(?![^\W\d_])", re.IGNORECASE)
_FUNCTIONS = name_set(
    "sin cos tan arcsin arccos arctan sinh cosh tanh cot sec csc sqrt cbrt log exp max min gcd lcm infinity infty"
)
_GLUED = re.compile(r"[-‑]?[A-Za-zÀ-ÿ]+")
_SIGNIFICANT = re.compile(
    r"\d|[π∞√∛∅ℝℤℕℚ¼½¾⅐-⅞①-⑳\\]|分之|(?<![^\W\d_])(?:pi|infinity|infty|oo)(?![^\W\d_])|[=<>≤≥≠+^¹²³⁰-₉]|\w\s?[-*/−·]\s?\w|,"
)
_CYRILLIC = re.compile("[\u0400-\u04ff]")
_DECIMAL_COMMA = re.compile(r"-?(?:\d+,(?:\d\d?|\d{4,})|0,\d+)")
_DOTTED = re.compile(r"[1-9]\d{0,2}(?:\.\d{3})+")
_CURRENCY = re.compile(r"\s?(?:€|eur|pesos|reais|soles|руб)", re.IGNORECASE)
_MARK = re.compile(r"\*\*|__|</?(?:b|strong)>|[*_`\"“”«»„「」【#]+")
_ENDS = frozenset(".!?。！？।؟\n")


class Lexeme(NamedTuple):
    """`kind` is math, value, choice, word, mark or punct; `text` is what it says, `parts` what a word can do."""

    kind: str
    text: str
    start: int
    end: int
    bold: bool
    parts: frozenset[str]

    @property
    def is_value(self) -> bool:
        return self.kind in ("math", "value", "choice")

    def ends_sentence(self, text: str) -> bool:
        """Whether it is the punctuation that ends a sentence of the text."""
        if self.kind != "punct" or self.text not in _ENDS:
            return False
        return self.text != "." or not text[self.end : self.end + 1].strip() or text[self.end] in "*\"”»)_<`'"


_NO_PARTS: frozenset[str] = frozenset()


def lex(text: str, begin: int, end: int) -> list[Lexeme]:
    """The tokens of a text that begin between two positions."""
    found: list[tuple[str, str, int, int, bool]] = []
    place, end, bold = begin, min(end, len(text)), False
    while place < end:
        character = text[place]
        if character in " \t\r\u00a0\u202f\u200b\u200e\u200f\ufeff":
            place += 1
            continue
        kind, said, after = _next(text, place)
        if kind == "mark" and (said in ("**", "__") or said.endswith(("b>", "strong>"))):
            bold = not bold
        found.append((kind, said, place, after, bold))
        place = after
    table = language_of([said.lower() for kind, said, *_ in found if kind == "word"])
    commas = table is not TABLES[0] or any(kind == "word" and _CYRILLIC.match(said) for kind, said, *_ in found)
    tokens = []
    for kind, said, start, after, in_bold in found:
        if kind == "value" and commas and _DECIMAL_COMMA.fullmatch(said):
            said = said.replace(",", ".")
        elif kind == "value" and commas and _DOTTED.fullmatch(said) and _CURRENCY.match(text, after):
            said = said.replace(".", "")
        tokens.append(Lexeme(kind, said, start, after, in_bold, _parts(table, said) if kind == "word" else _NO_PARTS))
    return tokens


def _parts(table: Mapping[str, frozenset[str]], said: str) -> frozenset[str]:
    word = " ".join(said.lower().replace("’", "'").split())
    parts = table.get(word)
    if parts is None and table is TABLES[0] and len(word) > 4 and word.endswith("ly"):
        return frozenset({"light"})
    return parts or _NO_PARTS


def _next(text: str, place: int) -> tuple[str, str, int]:
    plain = _PLAIN.match(text, place)
    if plain is not None and plain[0].lower() not in _FUNCTIONS:
        phrase = _PHRASE.match(text, place) if plain[0].lower() in FIRST_WORDS else None
        return ("word", phrase[0], phrase.end()) if phrase else ("word", plain[0], plain.end())
    character = text[place]
    if character in "$\\":
        formula = MATH.match(text, place)
        if formula is not None and not _is_money(formula):
            return "math", next(group for group in formula.groups() if group is not None).strip(), formula.end()
    choice = (
        _CHOICE.match(text, place) if character in "([（\\" or text[place + 1 : place + 2] in (")", "'", "’") else None
    )
    if choice is not None:
        letter = next(group for group in choice.groups() if group is not None)
        return "choice", OPTIONS.get(letter, letter.upper()), choice.end()
    value = _VALUE.match(text, place)
    if value is not None and _DASHED.search(value[0]) and text[value.end() :][:1] in (" ", "'"):
        value = _VALUE.match(text, place, place + value[0].rindex("-"))
    if value is not None and _SIGNIFICANT.search(value[0]):
        said, after = _TEMPERATURE.sub("", _AREA.sub(_area, value[0].strip())), value.end()
        if not _GLUED.match(text, after):
            base = _IN_BASE.match(text, after)
            return ("value", said + base[0], base.end()) if base else ("value", said, after)
        glued = _GLUED.match(text, after)
        assert glued is not None
        if said[-1].isdigit() and glued[0][0] not in "-‑" and (is_unit(glued[0]) or glued[0] in _ORDINALS):
            return "value", said + " " + glued[0], glued.end()
        if said[-1].isdigit():
            return "word", text[place : glued.end()], glued.end()
        return "value", said, after
    word = _WORD.match(text, place)
    if word is not None:
        return "word", word[0], word.end()
    mark = _MARK.match(text, place)
    if mark is not None:
        return "mark", mark[0], mark.end()
    if text.startswith(("->", "=>", "--"), place):
        return "punct", text[place : place + 2], place + 2
    return "punct", character, place + 1


def _area(unit: re.Match[str]) -> str:
    return f"\\text{{ {unit[1]}}}^{2 if unit[2] == '²' else 3}"


_ORDINALS = frozenset({"st", "nd", "rd", "th"})
_SAID_OF_NUMBERS = name_set(
    """
        hundred thousand million billion trillion dozen factorial squared cubed percent pct degrees degree halves thirds
        fourths fifths sixths eighths tenths hundredths thousandths square cubic sq cu am pm modulo mod base
        """
)


def is_unit(word: str) -> bool:
    """Whether a word is the name of a unit, or says how a number is meant."""
    return known(word.rstrip("²³")) or word.lower() in _SAID_OF_NUMBERS


def _is_money(formula: re.Match[str]) -> bool:
    """Whether a dollar sign before an amount of money was taken for the beginning of a formula."""
    inside = formula[4]
    if inside is None or _AMOUNT.match(inside) is None:
        return False
    return _WORDS.search(inside) is not None or formula.string[formula.end() : formula.end() + 1].isdigit()
