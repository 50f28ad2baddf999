"""From a completion and a gold answer to a verdict: extract, normalise, compare exactly; ask sympy only if that
fails."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from time import perf_counter
from typing import NamedTuple, TypeAlias

from lemma.grading.choice import read_choice, said_of_it, several, yes_or_no
from lemma.grading.evaluate import fraction_of
from lemma.grading.expression import Unreadable, read
from lemma.grading.extract import Extraction, boxed, extract, is_prose, visible
from lemma.grading.limits import MAX_ANSWER, MAX_BOX, MAX_GOLD, LimitExceeded, check_shape
from lemma.grading.normal_form import normalise, repair_escapes, squeezed
from lemma.grading.precision import stands_for
from lemma.grading.relations import contradicts
from lemma.grading.residues import holds, read_residues, same_residues, without_modulus
from lemma.grading.rules import Rules
from lemma.grading.shapes import same
from lemma.grading.single import Context, GoldLimit, Undecided, same_words, unread_leaves
from lemma.grading.spelt import spelt_number
from lemma.grading.structure import Leaf, shape
from lemma.grading.tokens import ambiguous, join_thousands, tokenise
from lemma.grading.verdict import Kind, Verdict

Symbolic: TypeAlias = Callable[[str, str], bool]


class PendingGrade(NamedTuple):
    """The exact path could not decide: these two normalised texts need sympy."""

    gold: str
    answer: str
    extracted: str
    rules: Rules


def gold_answer(gold: str) -> str:
    """The answer in a gold text: its last box, the text after ####, or the text itself."""
    gold = repair_escapes(gold)
    if "\\boxed" in gold or "\\fbox" in gold:
        box = boxed(gold)
        if box is not None and (box.answer or "####" not in gold):
            return box.answer or ""
    if "####" in gold:
        return gold.rpartition("####")[2].strip()
    return gold.strip()


@lru_cache(maxsize=8192)
def malformed(gold: str) -> bool:
    """Whether a gold that is there says nothing: braces that do not match, or neither letter, digit nor sign."""
    wanted = gold_answer(gold)
    braces = "".join(brace for brace in _BRACE.findall(wanted) if brace in "{}")
    while "{}" in braces:
        braces = braces.replace("{}", "")
    return bool(braces) or (bool(wanted) and not _SAYS.search(wanted))


_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_SAYS = re.compile(r"[^\W_]|\\\{\s*\\\}|^[-+*/<>=]$|[^\x00-\x7f\u2010-\u2026]")


def read_and_compare(prediction: str, gold: str, rules: Rules, start: float) -> Verdict | PendingGrade:
    """Find the answer of a completion and compare it exactly with the gold. `start` is when this grading began."""
    if not gold or not gold.strip():
        return Verdict("unknown", "no_gold", None, perf_counter() - start)
    if malformed(gold):
        return Verdict("unknown", "gold_unreadable", None, perf_counter() - start)
    exact, is_tagged = gold.strip(), "<" in prediction and len(prediction) <= len(gold) + TAGS_LENGTH
    if prediction.strip() == exact or (is_tagged and _ANY_TAG.sub("", visible(prediction, rules)).strip() == exact):
        return Verdict("right", "exact", _shown(exact), perf_counter() - start)
    if _same_sentence(prediction, gold, rules):
        return Verdict("right", "exact", _shown(gold.strip()), perf_counter() - start)
    extraction = extract(prediction, rules)
    meant = _yes_or_no(prediction, gold, extraction, rules)
    if meant is not None:
        return Verdict("right" if meant else "wrong", "text", extraction.answer, perf_counter() - start)
    if _ends_in(prediction, gold, extraction, rules):
        return Verdict("right", "text", gold.strip(), perf_counter() - start)
    if extraction.method == "box" and not extraction.answer and _open_box(prediction):
        return Verdict("wrong", "limit", None, perf_counter() - start)
    if not extraction.answer or not extraction.answer.strip():
        return Verdict("wrong", "no_answer", None, perf_counter() - start)
    outcome = compare_texts(gold, extraction.answer, rules)
    if isinstance(outcome, PendingGrade):
        return outcome
    return Verdict(outcome[0], outcome[1], _shown(extraction.answer), perf_counter() - start)


def _yes_or_no(prediction: str, gold: str, extraction: Extraction, rules: Rules) -> bool | None:
    """Whether a text says yes where the gold does, or no; None for other golds, or a text that says neither."""
    wanted = yes_or_no(gold)
    if wanted is None:
        return None
    given = said_of_it(extraction.answer) if extraction.answer else None
    if given is None and extraction.method in ("number", "math", "choice", "none"):
        given = said_of_it(visible(prediction, rules))
    return None if given is None else given == wanted


_WORDS = re.compile(r"(?:(?:\d{1,3}[^\W\d_]{2,}|[^\W\d_]{3,}|(?<=[a-z] )\d{1,4})[ '-]?){1,4}")
_LEADS_TO = r"(?:^|\b(?:is|are|was|were|be|becomes|called|on|it|series|sequence|integral)\b(?:\s+(?:an?|the))?)"


def _ends_in(prediction: str, gold: str, extraction: Extraction, rules: Rules) -> bool:
    """Whether a text without a marked answer ends in a gold in words: the winner is Bob."""
    wanted = _TEXT.sub(r"\1", gold.strip().strip("$"))
    found = extraction.answer or ""
    if (
        extraction.method not in ("bare", "number", "math", "none")
        or _WORDS.fullmatch(wanted) is None
        or wanted == found
    ):
        return False
    said = _TEXT.sub(r"\1", visible(prediction, rules)[-300:].strip())
    if not rules.case:
        wanted, said = wanted.lower(), said.lower()
    return re.search(rf"(?m){_LEADS_TO}[^\w.!?]*{re.escape(wanted)}[^\w?]*\Z", said) is not None


_TEXT = re.compile(r"\\(?:text|textbf|mathrm)\s*\{([^{}]*)\}")


def _open_box(prediction: str) -> bool:
    """Whether the last box has more in it than a box may hold."""
    place = prediction.rfind("\\boxed{")
    return place >= 0 and len(prediction) - place > MAX_BOX


def _same_sentence(prediction: str, gold: str, rules: Rules) -> bool:
    """Whether the prediction repeats a gold text of sentences word for word; numbers are not extracted from such a
    prediction."""
    if len(prediction) > 2 * MAX_ANSWER or len(gold) > MAX_ANSWER or not is_prose(gold):
        return False
    said = _ANY_TAG.sub(" ", visible(prediction, rules))
    return is_prose(said) and same_words(normalise(gold), normalise(said), rules)


# The most that tags around an answer add to it.
TAGS_LENGTH = 64
_ANY_TAG = re.compile(r"</?[A-Za-z_]{1,30}>")


def _fraction(text: str) -> Fraction | None:
    """The value of a whole number, decimal or fraction; None for any other text."""
    try:
        return fraction_of(read(tokenise(text.strip("$ ")))) if len(text) < _MOST_PLAIN else None
    except (Unreadable, LimitExceeded):
        return None


_MOST_PLAIN = 60


def _shown(answer: str) -> str:
    return answer if len(answer) <= 500 else answer[:500] + "..."


def _undecided(gold: str, answer: str) -> bool:
    raise Undecided


def compare_texts(gold: str, answer: str, rules: Rules) -> tuple[Kind, str] | PendingGrade:
    """Compare an extracted answer with a gold text: (kind, reason), or what sympy must still decide."""
    wanted = gold_answer(gold)
    if not wanted:
        return "unknown", "no_gold"
    if len(wanted) > MAX_GOLD:
        return "unknown", "gold_limit"
    if wanted == answer:
        return "right", "exact"
    if len(answer) > MAX_ANSWER + 1000:
        return "wrong", "limit"
    left, right = _fraction(wanted), _fraction(answer)
    if left is not None and right is not None and not rules.tolerant:
        equal = left == right or (rules.rounded and stands_for(left, right))
        return "right" if equal else "wrong", "number"
    wanted, answer_text = normalise(wanted), normalise(answer)
    if not wanted:
        return "unknown", "no_gold"
    if not answer_text:
        return "wrong", "no_answer"
    if squeezed(wanted) == squeezed(answer_text):
        return "right", "exact"
    try:
        outcome = decide(wanted, answer_text, rules, _undecided)
    except Undecided:
        return PendingGrade(wanted, answer_text, _shown(answer), rules)
    if outcome[0] == "wrong" and outcome[1] != "limit" and unread(wanted):
        return PendingGrade(wanted, answer_text, _shown(answer), rules)
    return outcome


@lru_cache(maxsize=8192)
def unread(wanted: str) -> tuple[str, ...]:
    """The parts of a normalised gold that are neither words nor anything that the exact path reads."""
    if (len(wanted) == 1 and wanted.isalpha()) or read_choice(wanted) or read_residues(wanted) or several(wanted):
        return ()
    try:
        return min((unread_leaves(shape(tokenise(text))) for text in _readings(wanted)), key=len)
    except LimitExceeded:
        return ()


def decide(wanted: str, answer: str, rules: Rules, symbolic: Symbolic) -> tuple[Kind, str]:
    """Compare two normalised texts. `symbolic` is asked if the exact comparison is not enough."""
    try:
        check_shape(wanted)
    except LimitExceeded:
        return "unknown", "gold_limit"
    try:
        check_shape(answer)
        chosen = _choices(wanted, answer, rules, symbolic)
        if chosen is not None:
            return chosen
        if _CLASSES.search(wanted) or _CLASSES.search(answer):
            outcome = _residues(wanted, answer)
            if outcome is not None:
                return outcome
            wanted, answer = without_modulus(wanted), without_modulus(answer)
        return _compare(wanted, answer, rules, symbolic)
    except GoldLimit:
        return "unknown", "gold_limit"
    except LimitExceeded:
        return "wrong", "limit"


def _choices(wanted: str, answer: str, rules: Rules, symbolic: Symbolic) -> tuple[Kind, str] | None:
    gold = read_choice(wanted)
    if gold is None:
        letters = several(wanted)
        if letters and letters == several(answer) and (not wanted.isalpha() or sorted(wanted) == list(wanted)):
            return "right", "choice"
        given = read_choice(answer)
        if given is None or not given.content:
            return None
        outcome = _compare(wanted, given.content, rules, symbolic)
        return outcome if outcome[0] == "right" else None
    given = None if several(answer) else read_choice(answer)
    if not gold.content:
        if given is None:
            return None
        return ("right" if given.letter == gold.letter else "wrong"), "choice"
    if given is not None and (not given.content or given.letter != gold.letter):
        return ("right" if given.letter == gold.letter else "wrong"), "choice"
    return _compare(normalise(gold.content), given.content if given else answer, rules, symbolic)


_CLASSES = re.compile(r"mod|\\equiv|odd|even|multiple|divisible|remainder|of the form|\d\s*\|", re.IGNORECASE)


def _residues(wanted: str, answer: str) -> tuple[Kind, str] | None:
    """If both are residue classes, whether they are the same; an answer with a false congruence is wrong."""
    gold, given = read_residues(wanted), read_residues(answer)
    if gold is not None and given is not None and not (gold.formula and given.formula):
        return "right" if same_residues(gold, given) and holds(answer) else "wrong", "structure"
    return None if holds(answer) else ("wrong", "structure")


def _compare(wanted: str, answer: str, rules: Rules, symbolic: Symbolic) -> tuple[Kind, str]:
    """Try each interpretation of commas; right in any one is right."""
    undecided, limit = False, False
    reason = "structure"
    for gold_text in _readings(wanted):
        try:
            gold_node = shape(tokenise(gold_text))
        except LimitExceeded as error:
            raise GoldLimit from error
        for answer_text in _readings(answer):
            try:
                answer_node = shape(tokenise(answer_text))
                context = Context(gold_text, answer_text, rules, symbolic, same)
                if isinstance(gold_node, Leaf) and isinstance(answer_node, Leaf):
                    reason = "expression"
                if same(gold_node, answer_node, context) and not contradicts(answer_node, context):
                    return "right", reason
            except Undecided:
                undecided = True
            except LimitExceeded:
                limit = True
    if same_words(wanted, answer, rules):
        return "right", "text"
    if undecided:
        raise Undecided
    if limit:
        raise LimitExceeded
    return "wrong", reason


_DECIMAL_COMMA = re.compile(r"(?<![\d.,])(\d+),(?=\d)(?!\d+(?:,|\.\d))")
_DOTS_AND_COMMA = re.compile(r"-?[1-9]\d{0,2}(?:\.\d{3})+,\d+")


_LISTED = re.compile(r",(?! )")


def _readings(text: str) -> list[str]:
    """1,234 is a number or a list; 0,5 is a list or a decimal; all other texts have one interpretation."""
    if " and " in text and (spelt := spelt_number(text)) is not None:
        return [str(spelt)]
    if "," not in text:
        return [text]
    if ambiguous(text):
        return [join_thousands(text), text]
    if _DOTS_AND_COMMA.fullmatch(text):
        return [text, text.replace(".", "").replace(",", ".")]
    decimal = _DECIMAL_COMMA.sub(r"\1.", text)
    plain = ";" in text or not any(bracket in text for bracket in ("(", "[", "\\{"))
    return [text, decimal] if plain and decimal != text and not _LISTED.search(decimal) else [text]
