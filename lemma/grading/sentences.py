"""The sentences at the end of a text, last first: which of them concludes something, and which is a question, a task or
a remark, or was cut off."""

from __future__ import annotations

import re
from itertools import pairwise

from lemma.grading.conclusions import AFTER_VERB, PLAIN, conclude, rank
from lemma.grading.languages import is_unspaced
from lemma.grading.lexer import MATH, Lexeme, lex
from lemma.grading.objects import LETTER, Stated, words_of

_SEARCHED = 1_500
_SENTENCES = 12
_LONG = 12
_END = re.compile(
    r"[.!?]+(?<!\bi\.e\.)(?<!\be\.g\.)(?<!\bvs\.)(?<!\bDr\.)(?<!\bMr\.)(?<!\bNo\.)(?<!\bMrs\.)(?<!\.\.)(?<!\s\.)"
    r"(?:(?<![\d)]!)|(?=\s+[A-Z]|\s*$))(?=[*_\"”'»)`$]*(?:\\[\])])?(?:\s|$))[*_\"”'»)`]*|[。！？।؟]\**|\n"
)
_CLOSED = re.compile(r"[.!?。！？।؟:)\]}|»”\"'`*$%]\s*$")


def concluded(text: str) -> Stated | None:
    """What the last sentences of a text conclude; of kind `cut` if the text was cut off before it did."""
    offset = max(0, len(text) - _SEARCHED)
    tail = text[offset:]
    if "\n" in tail:
        tail = MATH.sub(lambda m: m[0].replace("\n", " "), tail)
    ends = [0, *(m.end() for m in _END.finditer(tail)), len(tail)]
    spans = [(a, b) for a, b in pairwise(ends) if tail[a:b].strip(" \t\n*_#-")]
    asked = False
    for number, (begin, end) in enumerate(reversed(spans[-_SENTENCES:])):
        tokens = _after_number(lex(tail, begin, end))
        kind = _kind(tokens, tail[begin:end])
        if number == 0 and kind == "empty" and _breaks_off(tokens, tail):
            return None
        if kind == "question":
            asked = True
        if kind != "conclusion":
            continue
        if number == 0 and _cut_off(tokens, tail, spans[-2][1] if len(spans) > 1 else 0):
            return None
        if asked and not _concludes(tokens):
            continue
        found = conclude(tokens, tail)
        if found is not None:
            return _with_items_before(found, spans[: len(spans) - number], tail)
        if any(token.is_value for token in tokens) and not asked:
            return None
        said = words_of([token for token in tokens if token.bold], tail)
        if said and _concludes(tokens):
            return Stated(said, len(tokens), "words")
    return None


def _with_items_before(found: Stated, spans: list[tuple[int, int]], tail: str) -> Stated:
    """What the last item of a list assigns, together with what the items before it assign to other names."""
    names: list[str] = []
    said: list[str] = []
    for begin, end in reversed(spans):
        item = _ITEM.fullmatch(tail[begin:end].strip())
        if item is None or item[1] in names:
            break
        names.append(item[1])
        said.append(f"{item[1]} = {item[2]}")
    return found._replace(text=", ".join(reversed(said))) if len(said) > 1 else found


_ITEM = re.compile(r"[-*•]\s+[*$\\(]*([A-Za-z])\s*=\s*([^=*$,]{1,40}?)(?:\\\))?[*$.]*")


def _after_number(tokens: list[Lexeme]) -> list[Lexeme]:
    """The tokens of a sentence after the number that it has in a list."""
    kept = [t for t in tokens if t.kind != "mark"]
    named = bool(kept) and "numbered" in kept[0].parts
    number = kept[named : named + 2]
    if len(number) == 2 and number[0].text.isdigit() and number[1].text in ".):" and (named or len(kept) > 2):
        return tokens[tokens.index(number[1]) + 1 :]
    return tokens


def _concludes(tokens: list[Lexeme]) -> bool:
    first = next((t for t in tokens if t.kind != "mark"), None)
    return first is not None and ("so" in first.parts or first.bold)


def _kind(tokens: list[Lexeme], sentence: str) -> str:
    """Whether a sentence is a conclusion, a question or task, a remark, or has nothing to say."""
    kept = [token for token in tokens if token.kind != "mark"]
    if not kept:
        return "empty"
    if kept[-1].text in "?？؟":
        return "question"
    first = kept[0]
    if any("asks" in t.parts and (" " in t.text or t.text.lower().startswith("ask")) for t in kept[:12]):
        return "question"
    supposed = next((i for i, t in enumerate(kept[:12]) if t.text.lower() in _SUPPOSED), None)
    if supposed is not None and not any("so" in t.parts or t.text in ",;" for t in kept[supposed:]):
        return "question"
    chosen = "chooses" in first.parts and len(kept) > 1 and (kept[1].is_value or LETTER.fullmatch(kept[1].text))
    if "asks" in first.parts and not first.parts & {"so", "be"} and not chosen:
        worked = any(t.kind == "word" and "so" in t.parts for t in kept[1:]) or any(
            t.is_value and _WORKED.match(t.text) for t in kept[1:] if ":" in sentence
        )
        if not worked:
            return "question"
    if (
        first.text.lower() == "to"
        and any("asks" in t.parts for t in kept[1:2])
        and not any("=" in t.text for t in kept)
    ):
        return "remark"
    if ("aside" in first.parts and "ends" not in first.parts) or _of_the_answer(kept):
        return "remark"
    return (
        "conclusion"
        if any(t.is_value or t.bold or LETTER.fullmatch(t.text) or "be" in t.parts for t in kept)
        else "empty"
    )


def _of_the_answer(tokens: list[Lexeme]) -> bool:
    """Whether a sentence says something about the answer that is not its value: the answer has 3 digits."""
    place = next((i for i, token in enumerate(tokens) if "answer" in token.parts), None)
    if place is None or (tokens[place + 1 : place + 2] and tokens[place + 1].kind != "word"):
        return False
    later = next((i for i, t in enumerate(tokens) if i > place and (t.text in ",;:" or "so" in t.parts)), len(tokens))
    if any(t.parts & {"be", "so", "chooses"} for t in tokens[later:]):
        return False
    return all(t.parts & {"light", "so"} for t in tokens[:place]) or any("supposes" in t.parts for t in tokens[:place])


_WORKED = re.compile(r"(?:\\?[A-Za-z]+(?:_\w|\(\w\))?|[^A-Za-z=]*)\s*=")
"""A calculation, or the value of a name, rather than an equation to solve."""
_SUPPOSED = frozenset(
    {
        "consider",
        "suppose",
        "assume",
        "don't think",
        "do not think",
        "don't believe",
        "doubt",
        "nobody",
        "wrong to say",
        "no way",
        "by no means",
    }
)


def _breaks_off(tokens: list[Lexeme], tail: str) -> bool:
    """Whether a last sentence without a value ends in a word that something has to follow, or began a conclusion."""
    words = [token for token in tokens if token.kind == "word"]
    if not words or _CLOSED.search(tail):
        return False
    return bool(
        words[-1].parts & {"at", "be", "joins", "has", "light"}
        or words[0].parts & {"so", "supposes"}
        or words[0].text.lower() in _GOES_ON
    )


_GOES_ON = frozenset({"next", "now", "since", "because", "when", "first", "second", "we", "let", "after", "for"})


def _cut_off(tokens: list[Lexeme], tail: str, end: int) -> bool:
    """Whether the last sentence was cut off before it concluded. `end` is where the sentence before it ends."""
    kept = [i for i, token in enumerate(tokens) if token.kind != "mark"]
    last = tokens[kept[-1]]
    leads_on = (
        bool(last.parts & {"at", "be", "joins", "has"})
        or _UNFINISHED.search(last.text) is not None
        or ("so" in last.parts and len(kept) > 1)
    )
    if leads_on and not LETTER.fullmatch(last.text):
        return last.text == "$" or not _CLOSED.search(tail)
    if (
        _CLOSED.search(tail)
        or (not end and len(kept) < _LONG)
        or not re.search(r"[.!?。！？।؟]\s*$", tail[:end].rstrip("\n") or ".")
    ):
        return False
    place = next((i for i in reversed(kept[-3:]) if tokens[i].is_value or LETTER.fullmatch(tokens[i].text)), None)
    if place is None:
        return True
    if tokens[place - 1].text in ":：" or all(t.kind == "mark" or t.text in ":：" for t in tokens[place - 2 : place]):
        return False
    return len(kept) > 1 and rank(tokens, place, False) < (PLAIN if "=" in tokens[place].text else AFTER_VERB)


_UNFINISHED = re.compile(r"(?:[-+*/=×÷^<>$]|\\(?:times|cdot|div|pm|frac|sqrt|left))$")


def asks(text: str) -> bool:
    """Whether a short text is a task or a supposition, "Suppose that x = 9", rather than an answer."""
    return (
        any(c.isdigit() for c in text)
        and text[-1:] not in "?？؟"
        and _kind(lex(text, 0, len(text)), text) == "question"
    )


def introduced(text: str) -> bool:
    """Whether a short text says that what follows is a result, rather than being one: "Total: 7", "So 18"."""
    tokens = [token for token in lex(text, 0, len(text)) if token.kind != "mark"]
    named = len(tokens) > 1 and LETTER.fullmatch(tokens[0].text) and "no" in tokens[1].parts
    if any(t.kind == "word" and t.parts & {"be", "has", "so"} and after.is_value for t, after in pairwise(tokens[2:])):
        return True
    if not tokens or tokens[0].is_value or named:
        return any(
            "ends" in token.parts and (token.parts & {"aside", "no"} or is_unspaced(token.text)) for token in tokens
        )
    colon = next(
        (i for i, token in enumerate(tokens) if token.text in (":", "：", "=", "->", "=>", "→", "—", "–")), len(tokens)
    )
    if colon < len(tokens) - 1 and all(token.kind == "word" for token in tokens[:colon]):
        return True
    return any(token.parts & {"be", "so", "chooses"} for token in tokens) or bool(
        tokens[0].parts & {"light", "has", "no"}
    )
