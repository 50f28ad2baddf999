"""What the last sentences of a text conclude, where no statement names an answer.

A sentence is read clause by clause: "since", "which", "if" begin clauses that conclude nothing, "so", "giving", a
semicolon one that does. In the clause that concludes, a value in bold counts, then one after a verb ("is", "has",
"costs"), then one that is no circumstance ("in 5 days"). Questions, tasks, remarks ("note that") and a sentence that
was cut off conclude nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import pairwise

from lemma.grading.lexer import MATH, Lexeme, lex
from lemma.grading.objects import LETTER, Stated, compares, ends_member, is_light, read_object
from lemma.grading.single import spelt_number

_NAME = re.compile(r"\\?[A-Za-z]{1,3}(?:_\{?\w+\}?)?'?(?:\([A-Za-z]\))?")
_SEARCHED = 1_500
_SENTENCES = 12
_END = re.compile(
    r"[.!?]+(?<!\bi\.e\.)(?<!\be\.g\.)(?<!\bvs\.)(?<!\bDr\.)(?<!\bMr\.)(?<!\bNo\.)(?<!\bMrs\.)(?<!\.\.)(?<!\s\.)"
    r"(?:(?<![\d)]!)|(?=\s+[A-Z]|\s*$))(?=[*_\"”'»)`$]*(?:\\[\])])?(?:\s|$))[*_\"”'»)`]*|[。！？।؟]\**|\n"
)
_CLOSED = re.compile(r"[.!?。！？।؟:)\]}|»”\"'`*$%]\s*$")
_HEADING = re.compile(
    r"\s*(?:step|part|case|question|problem|given|method|example|note|option|schritt|étape|paso|шаг|步骤)\b.*|.*[:：]\s*$",
    re.IGNORECASE | re.DOTALL,
)
_PARTICIPLES = frozenset({"leaving", "making", "giving", "therefore", "hence", "thus"})
_COMPARED = frozenset(
    {
        "times",
        "more",
        "less",
        "fewer",
        "than",
        "percent",
        "%",
        "of",
        "half",
        "per",
        "greater",
        "larger",
        "smaller",
        "older",
        "younger",
    }
)


@dataclass
class Clause:
    """A clause: how it begins, and the values in it with how good each is as a result."""

    kind: str
    word: str = ""
    values: list[tuple[int, Stated]] = field(default_factory=list)

    def best(self, least: int) -> Stated | None:
        """The best value that is at least so good: the first after a verb, otherwise the last."""
        top = max((rank for rank, _ in self.values), default=-1)
        if top < least:
            return None
        among = [value for rank, value in self.values if rank == top]
        return among[0] if top == _AFTER_VERB else among[-1]


_CIRCUMSTANCE, _PLAIN, _AFTER_VERB, _BOLD = range(4)


def conclude(tokens: list[Lexeme], text: str) -> Stated | None:
    """What one sentence concludes, or None."""
    clauses = _clauses(tokens, text)
    bold = [c for c in clauses if c.kind not in ("sub", "leading") and c.best(_BOLD)]
    if bold:
        return bold[-1].best(_BOLD)
    results = [n for n, c in enumerate(clauses) if c.kind == "so" and c.values and any(p.values for p in clauses[:n])]
    found = _best(clauses[results[-1] :], (_AFTER_VERB, _PLAIN)) if results else None
    if results and found is None and clauses[results[-1]].word in _PARTICIPLES:
        found = clauses[results[-1]].best(_CIRCUMSTANCE)
    return found or _best(clauses, (_AFTER_VERB, _PLAIN, _CIRCUMSTANCE))


def _best(clauses: list[Clause], ranks: tuple[int, ...]) -> Stated | None:
    """The best value of the last clause that has one."""
    for least in ranks:
        for number in range(len(clauses) - 1, -1, -1):
            clause = clauses[number]
            following = clause.kind == "comma" and least == _PLAIN
            if clause.kind in ("sub", "leading") or (clause.kind == "which" and least != _AFTER_VERB):
                continue
            if following and any(c.best(_PLAIN) for c in clauses[:number] if c.kind in ("main", "so")):
                continue
            found = clause.best(_PLAIN if clause.kind == "which" else least)
            if found is not None:
                return found
        where = [c for c in clauses if c.kind == "sub" and c.word == "where"] if least == _PLAIN else []
        if where and where[-1].best(_PLAIN):
            return where[-1].best(_PLAIN)
    return None


def _clauses(tokens: list[Lexeme], text: str) -> list[Clause]:
    bold = any(token.bold and token.is_value for token in tokens)
    clauses = [Clause("main")]
    place, depth = 0, 0
    while place < len(tokens):
        token = tokens[place]
        if depth:
            depth += (token.text in "(（") - (token.text in ")）")
            place += 1
            continue
        if token.kind == "punct":
            if token.text in "(（":
                depth = 1
            else:
                _divide(clauses, token)
            place += 1
            continue
        if token.kind == "word":
            _begin_clause(clauses, tokens, place)
        found = _value(tokens, place, text)
        if found is None or compares(tokens, found.after):
            place += 1
            continue
        clauses[-1].values.append((_rank(tokens, place, bold), found))
        place = max(found.after, place + 1)
    return clauses


def _divide(clauses: list[Clause], token: Lexeme) -> None:
    """Begin a clause at a punctuation mark."""
    kind = clauses[-1].kind
    if token.text in ";:；：" or token.text in ("->", "=>", "→", "⇒"):
        clauses.append(Clause("main"))
    elif token.text in ",，":
        first = kind == "leading"
        clauses.append(Clause("main" if first else "sub" if kind == "sub" else "comma"))
    elif token.text in ("—", "–", "--", "-"):
        clauses.append(Clause("sub" if clauses[-1].values else "main"))


def _begin_clause(clauses: list[Clause], tokens: list[Lexeme], place: int) -> None:
    """Begin a clause at a word that leads one."""
    parts, low = tokens[place].parts, tokens[place].text.lower()
    begun = any(t.kind != "mark" and not is_light(t) for t in tokens[:place] if t.kind != "punct")
    if "so" in parts and not (low == "then" and clauses[-1].kind == "leading"):
        clauses.append(Clause("so", low))
    elif "ends" in parts and ("at" not in parts or (low in ("as", "since", "after", "before", "until") and not begun)):
        if low == "but":
            clauses.append(Clause("main"))
        elif not begun:
            comma = "at" not in parts or any(token.text in ",，" for token in tokens[place:])
            clauses[-1].kind = "leading" if comma and "be" not in parts else clauses[-1].kind
        elif (
            low in ("which", "that is")
            and clauses[-1].kind in ("main", "so", "comma")
            and _results(clauses[-1], tokens, place)
        ):
            clauses.append(Clause("which"))
        else:
            clauses.append(Clause("sub", low))
    elif "be" in parts and clauses[-1].kind == "sub" and clauses[-1].word == "not" and "'" in low:
        clauses.append(Clause("main"))
    elif low == "to" and place + 1 < len(tokens) and tokens[place + 1].kind == "word" and clauses[-1].values:
        clauses.append(Clause("sub"))


def _results(before: Clause, tokens: list[Lexeme], place: int) -> bool:
    """Whether a clause with "which" gives the result of the one before, rather than saying more of its value."""
    rest = tokens[place + 1 : place + 12]
    end = next((i for i, t in enumerate(rest) if t.kind == "punct" and t.text in ",;."), len(rest))
    rest = rest[:end]
    values = [t for t in rest if t.is_value]
    plain = len(values) == 1 and re.fullmatch(r"\\?[$€£]?\s?[\d.,]+", values[0].text) is not None
    compared = any(t.text.lower() in _COMPARED for t in rest)
    stated = any(rank == _BOLD for rank, _ in before.values) or (
        len(before.values) == 1 and before.values[0][0] == _AFTER_VERB
    )
    verb = tokens[place].text.lower() == "that is" or (bool(rest) and bool(rest[0].parts & {"be", "has"}))
    return verb and plain and not compared and not stated


def _value(tokens: list[Lexeme], place: int, text: str) -> Stated | None:
    """The value at a token; letters of options and spelt numbers only where a statement would have them."""
    token = tokens[place]
    if token.is_value:
        return read_object(tokens, place, text)
    if token.kind != "word":
        return None
    before = next((t for t in reversed(tokens[:place]) if t.kind != "mark" and t.text not in ":：" and _leads(t)), None)
    chosen = before is not None and "chooses" in before.parts
    leads = token.bold or (before is not None and bool(before.parts & {"be", "has", "chooses"}))
    if LETTER.fullmatch(token.text):
        if _said_correct(tokens, place):
            return Stated(token.text, place + 1, "choice")
        if chosen:
            return read_object(tokens, place, text)
        if not leads and (before is None or "so" in before.parts) and ends_member(tokens, place + 1):
            leads = place + 1 >= len(tokens) or tokens[place + 1].kind != "word" or "ends" in tokens[place + 1].parts
        return read_object(tokens, place, text) if leads and ends_member(tokens, place + 1) else None
    vague = token.text.lower() in ("one", "zero") and not ends_member(tokens, place + 1)
    if leads and token.text.isascii() and not vague and spelt_number(token.text) is not None:
        return Stated(str(spelt_number(token.text)), place + 1, "value")
    return None


def _leads(token: Lexeme) -> bool:
    """Whether a word before a value is more than an adverb or an article."""
    return not is_light(token) or "chooses" in token.parts


def _said_correct(tokens: list[Lexeme], place: int) -> bool:
    """Whether a value is said to be correct: option D is correct, (D) is the right choice."""
    after = place + 1
    while after < len(tokens) and tokens[after].kind == "mark":
        after += 1
    if after < len(tokens) and "correct" in tokens[after].parts:
        return True
    if after >= len(tokens) or "be" not in tokens[after].parts:
        return False
    after, negated = _past(tokens, after + 1)
    return not negated and after < len(tokens) and "correct" in tokens[after].parts


def _past(tokens: list[Lexeme], place: int) -> tuple[int, bool]:
    negated = False
    while place < len(tokens) and tokens[place].kind in ("word", "mark"):
        if "correct" in tokens[place].parts:
            break
        negated = negated or "no" in tokens[place].parts
        if tokens[place].kind == "word" and not tokens[place].parts & {"light", "no"}:
            break
        place += 1
    return place, negated


def _rank(tokens: list[Lexeme], place: int, bold: bool) -> int:
    token = tokens[place]
    if token.kind == "math" and _NAME.fullmatch(token.text):
        return _CIRCUMSTANCE
    if token.bold and bold:
        return _BOLD
    if (token.kind == "choice" or LETTER.fullmatch(token.text)) and _said_correct(tokens, place):
        return _BOLD
    before = place - 1
    total = False
    while before >= 0 and (
        tokens[before].kind == "mark" or is_light(tokens[before]) or tokens[before].text in ("$", "\\$")
    ):
        if tokens[before].kind == "word" and "at" in tokens[before].parts:
            break
        before -= 1
    if before < 0:
        return _PLAIN
    leader = tokens[before]
    if leader.kind == "punct" and leader.text in "=":
        return _AFTER_VERB
    if leader.kind != "word":
        return _PLAIN
    if leader.text.lower() == "of" and before and tokens[before - 1].text.lower() in _TOTALS:
        total = True
    if leader.parts & {"be", "has"} and not leader.parts & {"at"}:
        return _AFTER_VERB
    if leader.text.lower() in ("de", "di") and any("be" in t.parts for t in tokens[max(0, before - 3) : before]):
        return _AFTER_VERB
    if "numbered" in leader.parts and "light" not in leader.parts:
        return _CIRCUMSTANCE
    if "no" in leader.parts:
        return _CIRCUMSTANCE
    return _CIRCUMSTANCE if "at" in leader.parts and not total else _PLAIN


_TOTALS = frozenset(
    {"total", "sum", "cost", "profit", "price", "value", "average", "maximum", "minimum", "number", "amount", "result"}
)


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
        tokens = lex(tail, begin, end)
        kind = _kind(tokens, tail[begin:end])
        if number == 0 and kind == "empty" and _breaks_off(tokens, tail):
            return None
        if kind == "question":
            asked = True
        if kind != "conclusion":
            continue
        if number == 0 and _cut_off(tokens, tail, spans[-2][1] if len(spans) > 1 else 0):
            return None
        content = _after_number(tokens)
        if asked and not _concludes(content):
            continue
        found = conclude(content, tail)
        if found is not None:
            return found
        if any(token.is_value for token in content) and not asked:
            return None
    return None


def _after_number(tokens: list[Lexeme]) -> list[Lexeme]:
    """The tokens of a sentence after the number that it has in a list."""
    kept = [t for t in tokens if t.kind != "mark"]
    if (
        len(kept) > 3
        and kept[0].kind == "value"
        and kept[0].text.isdigit()
        and kept[1].text in ".)"
        and kept[2].kind == "word"
    ):
        return tokens[tokens.index(kept[1]) + 1 :]
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
    if any(t.text.lower() in _ASKED for t in kept[:12]):
        return "question"
    if "asks" in first.parts and not first.parts & {"so", "be"}:
        worked = any(t.kind == "word" and "so" in t.parts for t in kept[1:]) or any(
            t.is_value and "=" in t.text for t in kept[kept.index(first) + 1 :] if ":" in sentence
        )
        if not worked:
            return "question"
    if "aside" in first.parts and not any(t.text == "," for t in kept):
        return "remark"
    if "aside" in first.parts and "ends" not in first.parts:
        return "remark"
    return (
        "conclusion"
        if any(t.is_value or t.bold or LETTER.fullmatch(t.text) or "be" in t.parts for t in kept)
        else "empty"
    )


_ASKED = frozenset(
    {"asks", "asked", "how many", "how much", "want to find", "need to find", "goal is", "is to", "problem is"}
)


def _breaks_off(tokens: list[Lexeme], tail: str) -> bool:
    """Whether a last sentence without a value ends in a word that something has to follow, or began a conclusion."""
    words = [token for token in tokens if token.kind == "word"]
    if not words or _CLOSED.search(tail):
        return False
    return bool(words[-1].parts & {"at", "be", "joins", "has", "light"} or words[0].parts & {"so"})


def _cut_off(tokens: list[Lexeme], tail: str, end: int) -> bool:
    """Whether the last sentence was cut off before it concluded. `end` is where the sentence before it ends."""
    kept = [i for i, token in enumerate(tokens) if token.kind != "mark"]
    last = tokens[kept[-1]]
    leads_on = bool(last.parts & {"at", "be", "joins", "has"}) or ("so" in last.parts and len(kept) > 1)
    if leads_on and not LETTER.fullmatch(last.text):
        return not _CLOSED.search(tail)
    if _CLOSED.search(tail) or not end or not re.search(r"[.!?。！？।؟]\s*$", tail[:end].rstrip("\n")):
        return False
    place = next((i for i in reversed(kept[-3:]) if tokens[i].is_value or LETTER.fullmatch(tokens[i].text)), None)
    if place is None:
        return True
    return len(kept) > 1 and _rank(tokens, place, False) < (_PLAIN if "=" in tokens[place].text else _AFTER_VERB)


def introduced(text: str) -> bool:
    """Whether a short text says that what follows is a result, rather than being one: "Total: 7", "So 18"."""
    tokens = [token for token in lex(text, 0, len(text)) if token.kind != "mark"]
    if len(tokens) < 2:
        return False
    if tokens[0].is_value or (LETTER.fullmatch(tokens[0].text) and tokens[0].text not in "AI"):
        return any("ends" in token.parts and token.parts & {"aside", "no"} for token in tokens)
    colon = next((i for i, token in enumerate(tokens) if token.text in (":", "：", "->", "=>", "→")), len(tokens))
    if colon < len(tokens) - 1 and all(token.kind == "word" for token in tokens[:colon]):
        return True
    return any(token.parts & {"be", "so", "chooses"} for token in tokens) or is_light(tokens[0])
