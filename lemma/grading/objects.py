"""Objects: the values, options and units at a place of a text, what may stand before them, and sets told in words:
between 2 and 5, inclusive; x greater than 6; all real numbers except 3."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

from lemma.grading.lexer import Lexeme, is_unit
from lemma.grading.tokens import name_set
from lemma.grading.units import known

LEADS = frozenset({":", "：", "=", "->", "=>", "→", "⇒", "—", "–", "-", "--", "】"})
LETTER = re.compile(r"[A-J]")
_NAMED_OPTION = re.compile(r"([A-E])\s*=\s*(.+)")
_ASSIGNED = re.compile(r"\\?[A-Za-z]+(?:_\{?\w+\}?)?'?(?:\(\w\))?\s*(?:=|\\in)[^=]+$")
_PLAIN_NUMBER = re.compile(r"[-−]?\d+(?:\.\d+|/\d+)?")
_BELONGS = re.compile(
    r"\(mod|\\(?:pmod|%|text)|(?:[kcm]?m|mi|ft|k?g|[Ll])/(?:h|s|min|hr|[Ll]|m|cm)[²³]?$|(?:[kcm]?m|in|ft|yd|mi)\^\{?[23]\}?$"
)
_MORE = frozenset({"more", "less", "fewer", "greater", "above", "below", "higher", "lower", "up"})
COMPARISONS = name_set(
    """
        less more greater fewer between over under above below twice half double triple larger smaller times bigger
        higher lower third quarter minus plus
        """
)
_COMPARED = COMPARISONS - {"between", "over", "under", "above", "below", "half", "third", "quarter"}
_OR = frozenset({"or", "oder", "ou", "или", "або", "或", "或者", "أو", "یا", "या", "または", "o", "또는"})


class Stated(NamedTuple):
    """An object of a statement: its text, the token after it, and the kind of the first value, or `words`."""

    text: str
    after: int
    kind: str


def words_of(tokens: list[Lexeme], text: str) -> str:
    """The text of some tokens, without marks at its ends."""
    kept = [token for token in tokens if token.kind != "mark"]
    return text[kept[0].start : kept[-1].end].strip() if kept else ""


def read_object(tokens: list[Lexeme], place: int, text: str) -> Stated | None:
    """The value or values that begin at a token: 5, $x=2$ and $y=3$, (B) or (C), 12 cm, with what belongs to them."""
    first = read_one(tokens, place, text)
    if first is None:
        return None
    said, kind, after = first.text, first.kind, first.after
    measured, last = first.after - place > 1, first.text
    across = _across(tokens, place, first, text)
    if across is not None:
        return across
    while True:
        joined, next_place = _separator(tokens, after)
        if not joined:
            break
        following = read_one(tokens, next_place, text)
        if joined == ", " and following is not None and following.text.endswith((" st", " nd", " rd", " th")):
            break  # 31, the 11th prime
        if following is not None and (first.kind == "choice") != (following.kind == "choice"):
            break
        if following is None:
            if joined == " or " and next_place < len(tokens) and tokens[next_place].text.lower() in _MORE:
                return Stated(said + " or " + tokens[next_place].text, next_place + 1, kind)
            break
        if not ends_member(tokens, following.after):
            break
        another = _ASSIGNED.match(following.text) or _PLAIN_NUMBER.fullmatch(following.text)
        if "=" in last + following.text and not (_ASSIGNED.match(last) and another):
            said, after, last = following.text, following.after, following.text
            continue
        if joined == " or " and _same_number(said, following.text):
            after = following.after
            continue
        if joined == " or " and measured and following.after - next_place > 1 and following.kind == kind == "value":
            break
        said, after = said + joined + following.text, following.after
        last = last if "=" in last and "=" not in following.text else following.text
    return Stated(said, after, kind)


def _across(tokens: list[Lexeme], place: int, first: Stated, text: str) -> Stated | None:
    """Two values that are one answer after a verb: the dimensions are 6 by 9, the odds are 3 to 7."""
    after = first.after
    if after + 1 >= len(tokens) or tokens[after].text.lower() not in ("by", "to") or not tokens[after + 1].is_value:
        return None
    before = place - 1
    while before >= 0 and (tokens[before].kind == "mark" or is_light(tokens[before])):
        before -= 1
    second = read_one(tokens, after + 1, text)
    again = second.after if second is not None else len(tokens)
    if again + 1 < len(tokens) and tokens[after].text.lower() == tokens[again].text.lower() == "by":
        third = read_one(tokens, again + 1, text)
        second = third and second and third._replace(text=f"{second.text} by {third.text}")
    if (
        before < 0
        or not tokens[before].parts & {"be", "has"}
        or second is None
        or not ends_member(tokens, second.after)
    ):
        return None
    if first.kind == "choice" or (second.after - after > 2 and tokens[after + 2].text.lower() in _PLACES):
        return None
    return Stated(f"{first.text} {tokens[after].text} {second.text}", second.after, first.kind)


_PLACES = frozenset({"decimal", "significant", "d.p", "places", "digits", "figures", "sig"})


def compares(tokens: list[Lexeme], place: int) -> bool:
    """Whether a value is only said to be compared with another: 3 more than 9, 3 times 4."""
    rest = tokens[place : place + 4]
    before = tokens[place - 1]
    if [token.text.lower() for token in rest[:2]] == ["times", "as"]:
        return True
    if before.kind == "word" and not is_unit(before.text) and len(rest) > 1 and rest[1].text.lower() == "than":
        return False
    return len(rest) > 1 and rest[0].text.lower() in _COMPARED and any(token.is_value for token in rest[1:])


def ends_member(tokens: list[Lexeme], place: int) -> bool:
    """Whether a list may end here: not before a verb or another word that begins a clause of its own."""
    token = unmarked(tokens, place)
    if token is None or token.kind == "punct":
        return True
    return (
        token.kind == "word"
        and bool(token.parts & {"joins", "ends", "so", "no"})
        and ("at" not in token.parts or token.text.lower() == "since")
    )


def unmarked(tokens: list[Lexeme], place: int) -> Lexeme | None:
    while place < len(tokens) and tokens[place].kind == "mark":
        place += 1
    return tokens[place] if place < len(tokens) else None


def _separator(tokens: list[Lexeme], place: int) -> tuple[str, int]:
    """What joins the members of a list at a token, as a comma or the word "or", and where the next begins."""
    joined = ""
    while place < len(tokens):
        token = tokens[place]
        if token.kind == "punct" and token.text in ",;，、；" and not joined:
            joined = ", "
        elif token.text == "(" and place + 1 < len(tokens) and "joins" in tokens[place + 1].parts:
            pass
        elif token.kind == "word" and "joins" in token.parts and not joined.strip(", "):
            either = token.text.lower() in _OR
            joined = " or " if either else ", "
            place += 1
            break
        elif token.kind != "mark":
            break
        place += 1
    while place < len(tokens) and (tokens[place].kind == "mark" or (joined and is_light(tokens[place]))):
        place += 1
    return joined, place


def is_light(token: Lexeme) -> bool:
    return token.kind == "word" and "light" in token.parts and not token.parts & {"ends", "no"}


def read_one(tokens: list[Lexeme], place: int, text: str) -> Stated | None:
    while place < len(tokens) and tokens[place].kind == "mark":
        place += 1
    if place >= len(tokens):
        return None
    token = tokens[place]
    if token.kind == "choice" or (token.kind == "word" and LETTER.fullmatch(token.text)):
        return _option(tokens, place, text)
    if token.kind not in ("math", "value"):
        return None
    option = _NAMED_OPTION.fullmatch(token.text) if token.kind == "value" else None
    said = f"({option[1]}) {option[2]}" if option else token.text
    return _with_unit(said, tokens, place + 1, token.kind)


def _with_unit(said: str, tokens: list[Lexeme], place: int, kind: str) -> Stated:
    """A value with the unit or scale that follows it; a word for what is counted is passed over."""
    after = place
    while after < len(tokens) and tokens[after].kind == "mark":
        after += 1
    counted = 0
    while after < len(tokens):
        token = tokens[after]
        low = token.text.lower()
        if token.kind == "punct" and token.text in "%％":
            said += "%"
        elif token.kind == "math" and token.text in ("\\%", "^\\circ"):
            said += token.text
        elif (token.kind == "value" and _BELONGS.match(token.text)) or (
            token.kind == "word" and not counted and _measures(tokens, after)
        ):
            unit, power, exponent = token.text.partition("^")
            said += f" \\text{{ {unit}}}{power}{exponent}" if power or "/" in unit else " " + unit
        elif said[-1:].isalpha() and not counted and (low in ("per", "/") or (low.startswith("/") and kind == "value")):
            if after + 1 < len(tokens) and tokens[after + 1].kind == "word" and is_unit(tokens[after + 1].text):
                said += " per " + tokens[after + 1].text
                after += 1
            else:
                break
        elif (
            token.kind == "value"
            and said[-1:].isalpha()
            and said[0].isdigit()
            and not counted
            and _smaller(tokens, after)
        ):
            said += " " + token.text
        elif low in COMPARISONS:
            break
        elif token.kind == "word" and counted < 2 and not token.parts - {"aside"} and not LETTER.fullmatch(token.text):
            counted += 1
        elif token.kind == "mark":
            pass
        else:
            break
        after += 1
    return Stated(said, after, kind)


def _smaller(tokens: list[Lexeme], place: int) -> bool:
    """Whether a value with a unit goes on with what is left in a smaller one: 5 pounds 4 ounces."""
    following = tokens[place + 1 : place + 2]
    return (
        tokens[place].text.isdigit()
        and tokens[place - 1].kind == "word"
        and bool(following)
        and known(following[0].text)
    )


_FRACTION = re.compile(r"-?\d{1,18}(?:\.\d{1,18}|/0*[1-9]\d{0,17})?")


def _same_number(first: str, second: str) -> bool:
    """Whether a number is only written in another way."""
    return bool(_FRACTION.fullmatch(first) and _FRACTION.fullmatch(second)) and Fraction(first) == Fraction(second)


def _measures(tokens: list[Lexeme], place: int) -> bool:
    """Whether a word after a number is its unit; "in" is one only where nothing follows it."""
    low = tokens[place].text.lower()
    return is_unit(low) and (low != "in" or place + 1 >= len(tokens) or tokens[place + 1].kind in ("punct", "mark"))


def _option(tokens: list[Lexeme], place: int, text: str) -> Stated | None:
    """A letter of an option, with the text of the option after it: (B) 12, C. The mitochondria."""
    token = tokens[place]
    after = place + 1
    while after < len(tokens) and tokens[after].kind == "mark":
        after += 1
    if after >= len(tokens):
        return Stated(token.text, after, "choice")
    following = tokens[after]
    marked = token.kind == "choice"
    if following.kind == "punct" and following.text in ".):：" and not (marked and following.text == "."):
        after += 1
        marked = True
    if not marked and following.kind == "word" and not following.parts - {"aside", "correct"} and token.text in "AI":
        return None
    content = read_one(tokens, after, text) if marked else None
    whole = (token.kind == "choice" and tokens[after - 1].text not in ":：") or (
        content is not None and ends_member(tokens, content.after)
    )
    if content is not None and content.kind != "choice" and whole:
        return Stated(f"({token.text}) {content.text}", content.after, "choice")
    return Stated(token.text, after, "choice")


def skip_light(tokens: list[Lexeme], place: int, labelled: bool) -> tuple[int, bool]:
    """Past adverbs, articles, verbs, colons and marks before an object; whether a negation was among them."""
    negated = False
    while place < len(tokens):
        token = tokens[place]
        if token.kind == "punct":
            if not (token.text in LEADS or token.text in ",，" or (token.text == "\n" and labelled)):
                break
            labelled = labelled or token.text in ":："
        elif token.kind == "word":
            if LETTER.fullmatch(token.text):
                break
            if "no" in token.parts:
                negated = True
            elif not token.parts & {"be", "light", "answer", "so", "chooses", "correct"} or token.parts & {"no"}:
                break
        elif token.kind != "mark":
            break
        place += 1
    return place, negated


_NUMBER = (
    r"\$?\s*([-−–]?\s?(?:\d+(?:[.,/]\d+)*|\\[dt]?frac\{\d+\}\{\d+\}|\\infty|∞|infinity))\s*\$?(?![\w^!/*+(√π])(?!\s*\\)"
)
_BETWEEN = re.compile(
    rf"(?:between|from)\s+{_NUMBER}\s+(?:and|to)\s+{_NUMBER}"
    r"(?:,?\s*\(?\s*((?:both\s+)?inclusive|exclusive|both included)\b\)?)?"
)
_SIGNS = {
    "greater than or equal to": ">=",
    "less than or equal to": "<=",
    "greater than": ">",
    "larger than": ">",
    "bigger than": ">",
    "more than": ">",
    "less than": "<",
    "smaller than": "<",
    "no more than": "<=",
    "no less than": ">=",
    "at least": ">=",
    "at most": "<=",
}
_BOUND = rf"(?:strictly\s+)?({'|'.join(_SIGNS)})\s+{_NUMBER}"
_BOUNDED = re.compile(
    r"(?:\$?([B-HJ-Zb-z])\$?|real numbers|reals)\s+(?:(is|must be|has to be|should be|can be|are|be)\s+)?"
    rf"{_BOUND}(?:,?\s+(?:and|but)\s+(?:(?:is|are)\s+)?{_BOUND})?"
)
_EXCEPT = re.compile(rf"(?:except(?:\s+for)?|excluding)\s+\$?(?:[A-Za-z]\s*=\s*)?{_NUMBER}")
_OVER = frozenset(
    {"all", "every", "any", "real", "numbers", "values", "x", "n", "t", "lies", "lie", "anywhere", "strictly"}
)


def read_condition(tokens: list[Lexeme], place: int, text: str) -> tuple[Stated, bool] | None:
    """The set of numbers that the words at a token tell, and whether a verb leads to it."""
    token = tokens[place]
    low = token.text.lower()
    if low in ("between", "from"):
        found = _BETWEEN.match(text, token.start)
        return found and _range(tokens, place, found)
    if low in ("except", "excluding"):
        found = _EXCEPT.match(text, token.start)
        if found is None or not any(t.text.lower() in ("real", "reals") for t in tokens[:place]):
            return None
        return _told(tokens, place, found.end(), rf"\mathbb{{R}} \setminus \{{{found[1]}\}}"), True
    if len(token.text) != 1 and low not in ("real", "reals"):
        return None
    found = _BOUNDED.match(text, token.start)
    if found is None:
        return None
    name = found[1] or "x"
    said = name + _SIGNS[found[3]] + found[4]
    if found[5]:
        said += rf" \text{{ and }} {name}{_SIGNS[found[5]]}{found[6]}"
    return _told(tokens, place, found.end(), said), bool(found[2])


def _range(tokens: list[Lexeme], place: int, found: re.Match[str]) -> tuple[Stated, bool]:
    before = place - 1
    strict = place > 0 and tokens[before].text.lower() == "strictly"
    while before >= 0 and (
        tokens[before].kind == "mark" or tokens[before].text.lower() in _OVER or is_light(tokens[before])
    ):
        before -= 1
    said = f"{found[1]} to {found[2]}"
    if found[3] or strict:
        said = f"({found[1]}, {found[2]})" if strict or found[3] == "exclusive" else f"[{found[1]}, {found[2]}]"
    leads = before >= 0 and "be" in tokens[before].parts
    return _told(tokens, place, found.end(), said), leads or any(t.text.lower() == "all" for t in tokens[:place])


def _told(tokens: list[Lexeme], place: int, end: int, said: str) -> Stated:
    after = next((i for i in range(place, len(tokens)) if tokens[i].start >= end), len(tokens))
    return Stated(said, after, "math")
