"""What a sentence concludes, where no statement names an answer.

It is read clause by clause: "since", "which", "if" begin clauses that conclude nothing, "so", "giving", a
semicolon one that does. In the clause that concludes, a value in bold counts, then one after a verb ("is", "has",
"costs"), then one that is no circumstance ("in 5 days").
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from lemma.grading.languages import is_unspaced
from lemma.grading.lexer import Lexeme
from lemma.grading.objects import (
    COMPARISONS,
    LETTER,
    Stated,
    compares,
    ends_member,
    is_light,
    read_condition,
    read_object,
    read_one,
    skip_light,
)
from lemma.grading.spelt import spelt_number
from lemma.grading.tokens import name_set

_NAME = re.compile(r"\\?[A-Za-z]{1,3}(?:_\{?\w+\}?)?'?(?:\([A-Za-z]\))?")
_PARTICIPLES = name_set("leaving making giving spending earning yielding totaling totalling")
_COMPARED = COMPARISONS | name_set("% of per percent than older younger")


CIRCUMSTANCE, PLAIN, AFTER_VERB, _MARKED, _BOLD = range(5)


@dataclass
class Clause:
    """A clause: how it begins, and the values in it with how good each is as a result."""

    kind: str
    word: str = ""
    verb: bool = False
    denies: bool = False
    reason: bool = False
    values: list[tuple[int, Stated]] = field(default_factory=list)

    def best(self, least: int) -> Stated | None:
        """The best value that is at least so good: the first after a verb, otherwise the last."""
        top = max((rank for rank, _ in self.values), default=-1)
        if top < least:
            return None
        among = [value for rank, value in self.values if rank == top]
        if top == CIRCUMSTANCE and (len(among) > 1 or self.denies):
            return None
        return among[0] if top == AFTER_VERB else among[-1]


def conclude(tokens: list[Lexeme], text: str, least: int = CIRCUMSTANCE) -> Stated | None:
    """What one sentence concludes, or None; nothing that is less good a result than `least`."""
    clauses = _clauses(tokens, text)
    bold = [c for c in clauses if c.kind not in ("sub", "leading") and c.best(_MARKED)]
    if bold:
        bold = [c for c in bold if c.kind != "comma"] or bold
        return bold[-1].best(_MARKED)
    results = [n for n, c in enumerate(clauses) if c.kind == "so" and c.values and any(p.values for p in clauses[:n])]
    found = _best(clauses[results[-1] :], (AFTER_VERB, PLAIN)) if results else None
    if results and found is None and clauses[results[-1]].word in _PARTICIPLES:
        found = clauses[results[-1]].best(CIRCUMSTANCE)
    return found or _best(clauses, (AFTER_VERB, PLAIN, CIRCUMSTANCE)[: 3 - least])


def _best(clauses: list[Clause], ranks: tuple[int, ...]) -> Stated | None:
    """The best value of the last clause that has one."""
    for least in ranks:
        for number in range(len(clauses) - 1, -1, -1):
            clause = clauses[number]
            following = clause.kind == "comma" and least == PLAIN
            if clause.kind in ("sub", "leading") or (clause.kind == "which" and least != AFTER_VERB):
                continue
            if following and any(c.best(PLAIN) for c in clauses[:number] if c.kind in ("main", "so")):
                continue
            found = clause.best(PLAIN if clause.kind == "which" else least)
            if found is not None:
                return found
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
                _divide(clauses, tokens, place)
            place += 1
            continue
        if token.kind == "word":
            _begin_clause(clauses, tokens, place)
        told = read_condition(tokens, place, text) if token.kind in ("word", "math") else None
        if told is not None:
            clauses[-1].values.append((AFTER_VERB if told[1] else CIRCUMSTANCE, told[0]))
            place = told[0].after
            continue
        found = _value(tokens, place, text)
        if found is not None and token.is_value and _leads_sentence(tokens, place):
            found = read_one(tokens, place, text)
        if found is None or compares(tokens, found.after) or said_correct(tokens, place) is False:
            place += 1
            continue
        subject = tokens[found.after : found.after + 1]
        within = clauses[-1].kind != "sub" and clauses[-1].verb and subject and "be" in subject[0].parts
        clauses[-1].values.append((CIRCUMSTANCE if within else rank(tokens, place, bold), found))
        place = max(found.after, place + 1)
    return clauses


def _leads_sentence(tokens: list[Lexeme], place: int) -> bool:
    """Whether a value belongs to the circumstance that a sentence begins with: out of 60 students, 24 ..."""
    before = [token for token in tokens[:place] if token.kind not in ("mark", "punct")]
    return bool(before) and "at" in before[-1].parts and all(is_light(t) or t.parts & {"at", "so"} for t in before)


def _divide(clauses: list[Clause], tokens: list[Lexeme], place: int) -> None:
    """Begin a clause at a punctuation mark."""
    kind, token = clauses[-1].kind, tokens[place]
    if token.text in ";:；：" or token.text in ("->", "=>", "→", "⇒"):
        clauses.append(Clause("main"))
    elif token.text in ",，":
        first = kind == "leading" or (any(c.denies for c in clauses) and _says_it(tokens[place + 1 : place + 3]))
        clauses.append(Clause("main" if first else "sub" if kind == "sub" else "comma", reason=clauses[-1].reason))
    elif token.text in ("—", "–", "--", "-"):
        clauses.append(Clause("sub" if clauses[-1].values else "main"))


def _begins_anew(tokens: list[Lexeme]) -> bool:
    """Whether a clause with a subject and a verb of its own follows: and the circumference is 10."""
    verb = next((i for i, token in enumerate(tokens) if "be" in token.parts and token.kind == "word"), 0)
    return any(not is_light(t) for t in tokens[:verb]) and all(
        t.kind == "word" and not t.parts & {"ends", "so"} for t in tokens[:verb]
    )


def _says_it(tokens: list[Lexeme]) -> bool:
    """Whether what follows a denial says what is true instead: not 10, it is 11."""
    said = [token.text.lower() for token in tokens]
    return said[:1] == ["it's"] or (said[:1] == ["it"] and "be" in tokens[-1].parts)


def _begin_clause(clauses: list[Clause], tokens: list[Lexeme], place: int) -> None:
    """Begin a clause at a word that leads one."""
    parts, low = tokens[place].parts, tokens[place].text.lower()
    begun = any(t.kind != "mark" and not is_light(t) for t in tokens[:place] if t.kind != "punct")
    before = tokens[place - 1] if place else None
    if _is_predicate(clauses, tokens, place):
        clauses.append(Clause("main", verb=True))
        return
    clauses[-1].denies |= "no" in parts
    if low == "which" and clauses[-1].word == "not":
        clauses.append(Clause("main"))
        return
    if low == "that is" and before is not None and before.kind != "punct":
        clauses.append(Clause("sub", low))
        return
    if parts & {"be", "has"} and tokens[place + 1 : place + 2] and tokens[place + 1].text != "that":
        clauses[-1].verb = True
    if (
        low == "and"
        and clauses[-1].kind in ("main", "so")
        and clauses[-1].verb
        and clauses[-1].values
        and _begins_anew(tokens[place + 1 : place + 7])
    ):
        clauses.append(Clause("main"))
    elif "so" in parts and not _continues(clauses[-1], parts, low, before):
        clauses.append(Clause("so", low))
    elif low in _CONJUNCTIONS and any(c.values for c in clauses) and _has_clause(tokens, place, low, before):
        clauses.append(Clause("sub", low, reason=_gives_reason(parts, low, before)))
    elif low in _RESTATES and not any(c.best(PLAIN) for c in clauses):
        clauses.append(Clause("main"))
    elif (low in _PARTICIPLES and "so" in parts) or (
        low in _REACHES
        and before is not None
        and (before.text.lower() in _PEOPLE or is_light(before) or "has" in before.parts)
    ):
        pass
    elif (
        "ends" in parts
        and not (is_unspaced(low) and "be" in parts)
        and ("at" not in parts or (low in ("as", "since", "after", "before", "until") and not begun))
    ):
        if low == "but":
            clauses.append(Clause("main"))
        elif not begun:
            comma = "at" not in parts or any(token.text in ",，" for token in tokens[place:])
            clauses[-1].kind = "leading" if comma and "be" not in parts else clauses[-1].kind
        elif (
            low in ("which", "that is")
            and clauses[-1].kind in ("main", "so", "comma")
            and _results(next((c for c in reversed(clauses) if c.values), clauses[-1]), tokens, place)
        ):
            clauses.append(Clause("which"))
        else:
            clauses.append(Clause("sub", low, reason=_gives_reason(parts, low, before)))
    elif low == "to" and place + 1 < len(tokens) and tokens[place + 1].kind == "word" and clauses[-1].values:
        clauses.append(Clause("sub"))


def _is_predicate(clauses: list[Clause], tokens: list[Lexeme], place: int) -> bool:
    """Whether the verb of the sentence is here, after a clause within its subject, "the number of people who won is 4",
    or the second one, "is reached at 3 and equals 8"."""
    within = clauses[-1].kind == "sub" and not clauses[-1].reason
    if not within or not tokens[place].parts & {"be", "has"}:
        return False
    if clauses[-1].word.endswith(" which") and not clauses[-1].verb:
        return False
    if any(c.verb for c in clauses if c.kind != "sub") and "joins" not in tokens[place - 1].parts:
        return False
    after, negated = skip_light(tokens, place + 1, False)
    found = None if negated else read_object(tokens, after, "")
    return found is not None and ends_member(tokens, found.after)


def _gives_reason(parts: frozenset[str], low: str, before: Lexeme | None) -> bool:
    after_comma = before is not None and before.text in ",，"
    return "aside" in parts or low in _REASONS or (low == "as" and after_comma)


_REASONS = frozenset({"for", "although", "though", "while", "whereas", "so that"})
_CONJUNCTIONS = name_set("as since for after before until بعد قبل après avant nach después dopo após")
_RESTATES = frozenset({"namely", "specifically", "viz"})
_REACHES = frozenset({"found", "obtained", "reached", "computed", "calculated", "derived"})
_PEOPLE = frozenset({"i", "we", "you", "he", "she", "it", "they"})


def _continues(clause: Clause, parts: frozenset[str], low: str, before: Lexeme | None) -> bool:
    """Whether a word that may begin a conclusion is part of the clause it is in: after giving 8, if so then 5."""
    if before is None or before.kind != "word":
        return False
    return ("at" in before.parts and low in _PARTICIPLES) or (
        clause.kind == "sub" and (low == "in all" or ("light" in parts and not low.isascii()))
    )


def _has_clause(tokens: list[Lexeme], place: int, low: str, before: Lexeme | None) -> bool:
    """Whether a clause follows a conjunction, rather than the value of a circumstance: after giving 8, after 3 days."""
    if low == "for" and (before is None or before.text not in ",，"):
        return False
    if before is not None and (before.text.lower() == "but" or (low in ("as", "since") and before.text in ",，")):
        return before.text.lower() != "but"
    return not begins_value(tokens, place + 1)


def begins_value(tokens: list[Lexeme], place: int) -> bool:
    while place < len(tokens) and (tokens[place].kind == "mark" or is_light(tokens[place])):
        place += 1
    return place < len(tokens) and (tokens[place].is_value or LETTER.fullmatch(tokens[place].text) is not None)


def _results(before: Clause, tokens: list[Lexeme], place: int) -> bool:
    """Whether a clause with "which" gives the result of the one before, rather than saying more of its value."""
    rest = tokens[place + 1 : place + 12]
    end = next((i for i, t in enumerate(rest) if t.kind == "punct" and t.text in ",;."), len(rest))
    rest = rest[:end]
    values = [t for t in rest if t.is_value]
    plain = len(values) == 1 and re.fullmatch(r"\\?[$€£]?\s?[\d.,]+", values[0].text) is not None
    compared = any(t.text.lower() in _COMPARED for t in rest)
    stated = any(rank >= _MARKED for rank, _ in before.values) or (
        len(before.values) == 1 and before.values[0][0] == AFTER_VERB
    )
    verb = tokens[place].text.lower() == "that is" or (bool(rest) and bool(rest[0].parts & {"be", "has"}))
    return verb and plain and not compared and not stated


def _value(tokens: list[Lexeme], place: int, text: str) -> Stated | None:
    """The value at a token; letters of options and spelt numbers only where a statement would have them."""
    token = tokens[place]
    if token.is_value:
        return read_object(tokens, place, text)
    before = next((t for t in reversed(tokens[:place]) if t.kind != "mark" and t.text not in ":：" and _leads(t)), None)
    chosen = before is not None and "chooses" in before.parts
    leads = token.bold or (before is not None and bool(before.parts & {"be", "has", "chooses"}))
    if LETTER.fullmatch(token.text):
        said = said_correct(tokens, place)
        if said is not None:
            return Stated(token.text, place + 1, "choice") if said else None
        if chosen:
            return read_object(tokens, place, text)
        if (
            not leads
            and (before is None or "so" in before.parts or before.text.lower() == "but")
            and ends_member(tokens, place + 1)
        ):
            leads = place + 1 >= len(tokens) or tokens[place + 1].kind != "word" or "ends" in tokens[place + 1].parts
        return read_object(tokens, place, text) if leads and ends_member(tokens, place + 1) else None
    counted = place > 0 and tokens[place - 1].text.lower() in ("only", "exactly", "just")
    vague = token.text.lower() in ("one", "zero") and not counted and not ends_member(tokens, place + 1)
    if (leads or counted) and not vague and spelt_number(token.text) is not None:
        return Stated(str(spelt_number(token.text)), place + 1, "value")
    return None


def _leads(token: Lexeme) -> bool:
    """Whether a word before a value is more than an adverb or an article."""
    return not is_light(token) or "chooses" in token.parts


def said_correct(tokens: list[Lexeme], place: int) -> bool | None:
    """Whether an option is said to be correct, or not to be: option D is correct, B) is not right; None for neither."""
    verb, negated = None, False
    for token in tokens[place + 1 : place + 12]:
        if token.kind == "mark" or (verb is None and (token.text in ").,，）" or token.is_value)):
            continue
        if token.text.lower() in _WRONG and verb is not None:
            return negated
        if "correct" in token.parts or (verb is not None and "answer" in token.parts):
            return not negated
        negated = negated or "no" in token.parts
        if verb is None and ("be" in token.parts or token.text.lower() in ("seems", "looks", "appears")):
            verb = token
        elif verb is None or token.kind != "word" or not token.parts & {"light", "no"}:
            return None
    return None


_WRONG = frozenset({"wrong", "incorrect", "false"})


def rank(tokens: list[Lexeme], place: int, bold: bool) -> int:
    token = tokens[place]
    if token.kind == "math" and _NAME.fullmatch(token.text):
        return CIRCUMSTANCE
    chosen = (token.kind == "choice" or LETTER.fullmatch(token.text)) and said_correct(tokens, place)
    if chosen:
        return _BOLD
    led = _rank_after(tokens, place)
    return led if not (token.bold and bold) else _MARKED if led == CIRCUMSTANCE else _BOLD


def _rank_after(tokens: list[Lexeme], place: int) -> int:
    """How good a result a value is by what stands before it."""
    before = place - 1
    while before >= 0 and (
        tokens[before].kind == "mark"
        or is_light(tokens[before])
        or tokens[before].text in ("$", "\\$")
        or (tokens[before].parts >= {"so", "light"} and before)
    ):
        if tokens[before].kind == "word" and "at" in tokens[before].parts:
            break
        before -= 1
    if before < 0:
        return PLAIN
    leader = tokens[before]
    if leader.kind == "punct" and leader.text in "=:":
        return AFTER_VERB
    if leader.parts & {"be", "has"} and not leader.parts & {"at"}:
        return AFTER_VERB
    total = leader.text.lower() == "of" and before > 0 and tokens[before - 1].text.lower() in _TOTALS
    numbered = "numbered" in leader.parts and "light" not in leader.parts
    return CIRCUMSTANCE if numbered or ("at" in leader.parts and not total) else PLAIN


_TOTALS = name_set(
    "height length area width volume speed distance time age score ratio difference product "
    "total sum cost profit price value average maximum minimum number amount result"
)
