"""What a text states as its answer.

A statement is a noun ("the answer", "Ответ", "答案"), what leads to a value (a verb, a colon), and its object: a value
or several, an option, or words. Adverbs before the object are skipped; it ends where its clause ends ("because",
"which", "so", a comma and a clause, a bracket). What is negated, asked or supposed states nothing. Without such a
noun, the last conclusion of the text counts, read clause by clause (`lemma/grading/conclusions.py`).
"""

from __future__ import annotations

import re
from itertools import pairwise

from lemma.grading.conclusions import PLAIN, begins_value, conclude, said_correct
from lemma.grading.languages import nouns_in
from lemma.grading.lexer import Lexeme, lex
from lemma.grading.objects import (
    COMPARISONS,
    LEADS,
    LETTER,
    Stated,
    compares,
    is_light,
    read_object,
    read_one,
    skip_light,
    unmarked,
    words_of,
)
from lemma.grading.spelt import spelt_number

_LABEL = re.compile(r"(?:^|\n)[\s*#]*(A)\**\s*:")
_OPTIONS = re.compile(r"(?:^|\n)[\s*#]*B\**\s*[:.)]")
_BEFORE = re.compile(r"[.!?]\s|[。！？।؟\n;]")


def stated(text: str) -> tuple[str | None, int] | None:
    """The last statement of an answer: its object and where it was found; the object is None if it is only denied.

    None if there is no statement.
    """
    lower = text.lower()
    if len(lower) != len(text):
        lower = text
    denied: list[str] = []
    places = [begin for begin, _ in nouns_in(lower)]
    label = next(reversed(list(_LABEL.finditer(text))), None) if "A" in text else None
    short = -1 if label is None or _OPTIONS.search(text) else label.start(1)
    for start in sorted([*places, short] if short >= 0 else places, reverse=True)[:60]:
        tokens = lex(text, _begin(text, start), start + 400)
        place = next((i for i, token in enumerate(tokens) if token.end > start), None)
        if place is None or ("answer" not in tokens[place].parts and start != short):
            continue
        found = statement_at(tokens, place, text)
        if found is None:
            continue
        if found.kind == "heading":
            return None
        if found.kind == "denied":
            denied.append(found.text)
            continue
        return (None if found.text in denied else found.text), start
    return (None, 0) if denied else None


def _begin(text: str, place: int) -> int:
    begin = max(0, place - 300)
    for end in _BEFORE.finditer(text, begin, place):
        begin = end.end()
    return begin


def statement_at(tokens: list[Lexeme], noun: int, text: str) -> Stated | None:
    """The statement whose noun is at a token. Of kind `denied` if its object is only denied."""
    if _supposed(tokens, noun) or _counterfactual(tokens[noun + 1 : noun + 5]):
        return None
    lead = _lead(tokens, noun, text)
    if lead is None:
        return _turned_around(tokens, noun, text)
    place, negated, labelled = lead
    return _object_after(tokens, place, negated, labelled, text)


def _counterfactual(after: list[Lexeme]) -> bool:
    """The answer would have been 10."""
    said = [token.text.lower() for token in after]
    return any(pair in (["would", "have"], ["could", "have"], ["might", "have"]) for pair in map(list, pairwise(said)))


def _supposed(tokens: list[Lexeme], noun: int) -> bool:
    """Whether the statement is a supposition or a question: if the answer is 5, is the answer 5?"""
    for place in range(noun - 1, -1, -1):
        token = tokens[place]
        if token.is_value and all(t.parts == {"light"} for t in tokens[place + 1 : noun]):
            break
        if (token.kind == "punct" and token.text in ",;:，：；\n") or (token.kind == "word" and "so" in token.parts):
            break
        if token.kind == "word" and "supposes" in token.parts:
            return True
    for token in tokens[noun:]:
        if token.kind == "punct" and token.text in ".!。！।\n":
            return False
        if token.kind == "punct" and token.text in "?？؟":
            return True
    return False


def _lead(tokens: list[Lexeme], noun: int, text: str) -> tuple[int, bool, bool] | None:
    """Where the object after a noun begins, whether it is negated, and whether the noun is a label."""
    first = all(token.kind == "mark" for token in tokens[:noun])
    negated, place, words = False, noun + 1, 0
    while place < len(tokens) and words < 12:
        token = tokens[place]
        if token.kind == "word" and LETTER.fullmatch(token.text):
            if "chooses" in tokens[place - 1].parts:
                return place, negated, False
            if place == noun + 1 and not tokens[noun].text.isascii():
                return place, negated, True
        if token.kind == "word":
            if "no" in token.parts:
                negated = True
            elif "be" in token.parts or token.text.lower().endswith("n't"):
                return place + 1, negated or token.text.lower().endswith("n't"), False
            elif token.parts & {"ends", "asks"} and not token.parts & {"at", "light"}:
                return None
            words += 1
        elif token.kind == "punct":
            if token.text in LEADS:
                return place + 1, negated, True
            if token.text == "\n" and (first or words == 0):
                return place + 1, negated, True
            if token.text == "." and first and words == 0:
                return (place + 1, negated, True) if begins_value(tokens, place + 1) else None
            if token.text not in ",，()":
                return None
            words += 1
        elif token.is_value and negated and all(t.kind != "punct" for t in tokens[noun + 1 : place]):
            return place, negated, False
        elif token.is_value:
            led = all(is_light(t) or t.kind == "mark" for t in tokens[noun + 1 : place])
            if (first and place == noun + 1) or (led and not tokens[noun].text.isascii()):
                return place, negated, place == noun + 1
            if not tokens[place - 1].parts & {"numbered", "at"}:
                return None
            words += 1
        place += 1
    return None


def _object_after(tokens: list[Lexeme], begin: int, negated: bool, labelled: bool, text: str) -> Stated | None:
    place, denial = skip_light(tokens, begin, labelled)
    if any(token.text.lower() in ("at least", "at most") for token in tokens[begin:place]):
        return _words(tokens, begin, text)
    found = _formula(tokens, place, text) or read_object(tokens, place, text)
    if found is None or compares(tokens, found.after) or [t.text for t in tokens[found.after :]][:1] == ["of"]:
        restated = _restated(tokens, place, text)
        if restated is not None or (found is not None and tokens[found.after].text != "of"):
            return restated or _words(tokens, place, text)
    verb = unmarked(tokens, found.after) if found is not None and found.kind == "choice" else None
    if verb is not None and "be" in verb.parts and "ends" not in verb.parts and not said_correct(tokens, place):
        return None
    if negated or denial:
        return _instead(tokens, found, text) if found is not None else None
    if found is not None:
        return _instead(tokens, found, text) if _denied_after(tokens, found.after) else found
    return _clause(tokens, place, labelled, text)


def _formula(tokens: list[Lexeme], place: int, text: str) -> Stated | None:
    """All that follows up to the end of the clause, if it is LaTeX with letters between spaces: b s+1, X^{2} t."""
    end = place
    while end < len(tokens) and (tokens[end].kind != "punct" or tokens[end].text in "()"):
        token = tokens[end]
        if token.kind in ("math", "choice", "mark") or (token.kind == "word" and (token.parts or len(token.text) > 1)):
            return None
        end += 1
    if end - place < 2:
        return None
    said = words_of(tokens[place:end], text)
    return Stated(said, end, "value") if _WRITTEN.search(said) else None


def _restated(tokens: list[Lexeme], place: int, text: str) -> Stated | None:
    """The value of an object that is told by others and then as it is: twice 21, or 42; 3/5 of 100, that is 60."""
    while place + 1 < len(tokens) and not tokens[place].ends_sentence(text):
        word = tokens[place + 1].text.lower().rstrip(".")
        is_verb = word == "which" and any("be" in token.parts for token in tokens[place + 2 : place + 3])
        if tokens[place].text == "," and (word in _THAT_IS or is_verb):
            return read_object(tokens, skip_light(tokens, place + 2, False)[0], text)
        place += 1
    return None


_THAT_IS = frozenset({"or", "i.e", "that is", "namely", "so"})
_WRITTEN = re.compile(r"[\\^_=]|\w[+*/-]")


def _clause(tokens: list[Lexeme], place: int, labelled: bool, text: str) -> Stated | None:
    """An object that is no value at once: words, or a clause with a value in it."""
    words = _words(tokens, place, text)
    end = next((i for i in range(place, len(tokens)) if tokens[i].ends_sentence(text)), len(tokens))
    if words is None:
        return None
    told = any(token.parts & {"be", "has"} for token in tokens[place:end])
    compared = any(token.text.lower() in COMPARISONS for token in tokens[place : words.after])
    if compared and not told and words.after - place < 5:
        return words
    if labelled and (told or any(token.is_value for token in tokens[place:end])):
        return Stated("", place, "heading")
    number = spelt_number(words.text)
    if number is not None and "correct" not in tokens[place - 1].parts:
        return Stated(str(number), words.after, "value")
    found = conclude(tokens[place:end], text, PLAIN)
    return Stated(found.text, end, found.kind) if found else words


def _words(tokens: list[Lexeme], begin: int, text: str) -> Stated | None:
    """The words that begin at a token, up to the end of their clause."""
    place = begin
    while place < len(tokens):
        token = tokens[place]
        if token.kind == "punct" and (token.text in ",;，；(" or token.ends_sentence(text)):
            break
        if token.kind == "word" and place > begin and "ends" in token.parts and not token.parts & {"at", "light"}:
            break
        place += 1
    said = words_of(tokens[begin:place], text)
    return Stated(said, place, "words") if said and place - begin <= 40 else None


def _instead(tokens: list[Lexeme], denied: Stated, text: str) -> Stated:
    """What is stated in the place of a denied value: not 17 but 18; not 17, it is 18."""
    place = denied.after
    while place < len(tokens):
        token = tokens[place]
        if (token.kind == "word" and token.text.lower() in _BUTS) or ("be" in token.parts and token.kind == "word"):
            after, negated = skip_light(tokens, place + 1, False)
            found = None if negated else read_object(tokens, after, text)
            if found is not None and found.text != denied.text:
                return found
        place += 1
    return Stated(denied.text, denied.after, "denied")


def _denied_after(tokens: list[Lexeme], place: int) -> bool:
    """Whether a value is denied by what follows it, as Japanese and Korean do."""
    if place < len(tokens) and tokens[place].text in ("이", "가"):
        place += 1
    return place < len(tokens) and tokens[place].text in _DENIES_BEFORE


_DENIES_BEFORE = frozenset({"ではなく", "じゃなく", "でなく", "아니라", "아니고"})
_BUTS = _DENIES_BEFORE | frozenset(
    {"but", "rather", "sondern", "sino", "ma", "mais", "mas", "а", "而是", "بل", "बल्कि", "aber", "instead"}
)


def _turned_around(tokens: list[Lexeme], noun: int, text: str) -> Stated | None:
    """5 is the answer; not 30 but 29 is the answer."""
    verb = next((i for i in range(noun - 1, max(-1, noun - 6), -1) if "be" in tokens[i].parts), None)
    if verb is None or any(
        not is_light(t) and t.kind != "mark" and not t.parts & {"correct", "be"} for t in tokens[verb:noun]
    ):
        return None
    return value_before(tokens, verb, text)


def value_before(tokens: list[Lexeme], verb: int, text: str) -> Stated | None:
    """The value whose verb is at a token, if nothing denies it."""
    place = verb - 1
    while place >= 0 and tokens[place].kind == "mark":
        place -= 1
    if place < 0 or any("no" in token.parts for token in tokens[verb : verb + 2]):
        return None
    found = read_one(tokens, place, text)
    before = next((token for token in reversed(tokens[:place]) if token.kind != "mark"), None)
    return None if before is not None and "no" in before.parts else found


def object_first(text: str) -> str | None:
    """The object with which a text begins, after adverbs."""
    tokens = lex(text, 0, min(len(text), 700))
    place, _ = skip_light(tokens, 0, False)
    found = read_object(tokens, place, text)
    return found and found.text
