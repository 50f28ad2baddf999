"""Whether two single answers are the same: numbers, expressions, times, ratios, numbers in a base, words."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from lemma.grading import evaluate
from lemma.grading.evaluate import NotRational, Undefined
from lemma.grading.expression import Tree, Unreadable, read
from lemma.grading.limits import GoldLimit, LimitExceeded
from lemma.grading.normal_form import LITTLE, squeezed, words
from lemma.grading.precision import enough_digits, stands_for
from lemma.grading.rules import Rules
from lemma.grading.spelt import spelt_number
from lemma.grading.structure import Leaf, Node, Tokens, parts
from lemma.grading.tokens import spelling, tokenise
from lemma.grading.units import CENT, COUNTED, conversion

_BASE = re.compile(r"\(?([0-9A-Fa-f]+)\)?_\{?(\d{1,2}|\\text\{[a-z]+\})\}?$")
_TIME = re.compile(
    r"(\d{1,2})(?::(\d\d)(?::(\d\d))?|(?=[^:]*[ap]\.?\s*m))\s*(?:\\text\{)?\s*([ap])?\.?\s*(?:m\.?)?\s*\}?$",
    re.IGNORECASE,
)


# Letters in brackets and between bars: P(A|B), a|b.
_OF_NAMES = re.compile(r"[A-Za-z(),|<> ]+")


class Undecided(Exception):
    """The exact path cannot say; sympy may."""


@dataclass(frozen=True, slots=True)
class Context:
    """What a comparison needs besides its two nodes. `symbolic` answers for two LaTeX texts or raises."""

    gold: str
    answer: str
    rules: Rules
    symbolic: Callable[[str, str], bool]
    compare: Callable[[Node, Node, Context], bool] | None = None

    def same(self, gold: Node, answer: Node) -> bool:
        """The comparison of parts, for the functions that it calls."""
        assert self.compare is not None
        return self.compare(gold, answer, self)


def same_leaf(gold: Leaf, answer: Leaf, context: Context) -> bool:
    """Whether two leaves are the same answer under the rules."""
    factor = conversion(gold.unit, answer.unit)
    if factor is None:
        return False
    rates = [any(t.kind == "%" for t in leaf.tokens) for leaf in (gold, answer)]
    if rates[0] != rates[1] and (answer if rates[0] else gold).unit not in (None, COUNTED):
        return False
    gold_text, answer_text = spelling(gold.tokens), spelling(answer.tokens)
    if gold.unit is None and answer.unit == CENT and "." in gold_text:
        factor = CENT.size
    if factor == 1 and squeezed(gold_text) == squeezed(answer_text) != "":
        return True
    context = replace(context, gold=gold_text, answer=answer_text)
    gold_tree, answer_tree = _tree(gold.tokens, True), _tree(answer.tokens, False)
    if gold_tree is not None and answer_tree is not None:
        if _words_only(gold.tokens) and _words_only(answer.tokens) and not _product(gold.tokens):
            return same_words(gold_text, answer_text, context.rules)
        return same_value(gold_tree, answer_tree, factor, context)
    special = _special(gold_text, answer_text, context)
    if special is not None:
        return special
    return same_words(gold_text, answer_text, context.rules) or _unread(gold, answer, gold_tree, answer_tree, context)


def _unread(gold: Leaf, answer: Leaf, gold_tree: Tree | None, answer_tree: Tree | None, context: Context) -> bool:
    """Whether two leaves, of which one is no formula, are the same number in words, or the same for sympy."""
    gold_text, answer_text = context.gold, context.answer
    gold_word, answer_word = is_text(gold.tokens), is_text(answer.tokens)
    spelt_gold = spelt_number(gold_text) if gold_word or not gold_text.isascii() else None
    spelt_answer = spelt_number(answer_text) if answer_word or not answer_text.isascii() else None
    if gold_word or answer_word or spelt_answer is not None or spelt_gold is not None:
        if spelt_gold is not None and answer_tree is not None:
            return same_value(("num", spelt_gold), answer_tree, Fraction(1), context)
        if spelt_answer is not None and gold_tree is not None:
            return same_value(gold_tree, ("num", spelt_answer), Fraction(1), context)
        return False
    return context.symbolic(context.gold, context.answer)


def unread_leaves(node: Node) -> tuple[str, ...]:
    """The texts of the leaves of a node that this module can neither read nor compare as words."""
    if not isinstance(node, Leaf):
        return tuple(text for part in parts(node) for text in unread_leaves(part))
    text = spelling(node.tokens)
    special = _TIME.match(text) or _BASE.match(text.replace(" ", "")) or _OF_NAMES.fullmatch(text)
    known = is_text(node.tokens) or special or (":" in text and _ratio(text) is not None)
    return () if known or _tree(node.tokens, False) is not None else (text,)


def _tree(tokens: Tokens, gold: bool) -> Tree | None:
    try:
        return read(tokens)
    except Unreadable:
        return None
    except LimitExceeded as error:
        if gold:
            raise GoldLimit from error
        raise


def is_text(tokens: Tokens) -> bool:
    """Whether the leaf contains words that are not part of a formula; environment names do not count."""
    for place, token in enumerate(tokens):
        if token.kind == "text":
            return True
        named = place >= 2 and tokens[place - 1].kind == "{" and tokens[place - 2].value in ("begin", "end")
        if token.kind == "word" and len(token.value) > 3 and not named:
            return True
    return _words_only(tokens)


def _words_only(tokens: Tokens) -> bool:
    """Whether a text is just a word: short ones, such as `cat`, would otherwise pass as products of letters."""
    return bool(tokens) and all(t.kind in ("word", "text") for t in tokens)


def _product(tokens: Tokens) -> bool:
    """Whether a text is two small letters that are no word, such as xy."""
    value = tokens[0].value
    return len(tokens) == 1 and len(value) == 2 and value.islower() and value not in LITTLE


_NOTHING = re.compile(
    r"(?:there (?:is|are|exists?) )?no (?:(?:such|real) )*(?:solution|number|value|root|integer)s?(?: exists?)?"
    r"|none|(?:the )?empty ?set"
)
_NO_VALUE = re.compile("dne|(?:(?:limit|it) )?does not exist")


def same_words(gold: str, answer: str, rules: Rules) -> bool:
    """The same words, whatever their case, spacing and punctuation."""
    left, right = words(gold), words(answer)
    for meaning in (_NOTHING, _NO_VALUE):
        if meaning.fullmatch(left):
            return meaning.fullmatch(right) is not None
    if len(left) == 1 or rules.case:
        return squeezed(gold.strip()) == squeezed(answer.strip()) or (
            left == right and (len(left) > 1 or _bare(gold) == _bare(answer)) and not rules.case
        )
    return bool(left) and squeezed(left) == squeezed(right)


def _bare(text: str) -> str:
    return re.sub(r"\\text\{([^{}]*)\}", r"\1", text).strip(" (){}")


def _special(gold: str, answer: str, context: Context) -> bool | None:
    """Times of day, ratios and numbers in another base; None if neither text is one."""
    times = _TIME.match(gold), _TIME.match(answer)
    if times[0] and times[1]:
        return _clock(times[0], times[1])
    bases = _BASE.match(gold.replace(" ", "")), _BASE.match(answer.replace(" ", ""))
    if bases[0] or bases[1]:
        return _based(gold, answer, bases)
    if ":" in gold or ":" in answer:
        return _same_ratio(gold, answer, context)
    return None


def _same_ratio(gold: str, answer: str, context: Context) -> bool | None:
    """a:b:c up to a factor; a plain number is number:1. None if a part cannot be parsed."""
    left, right = _ratio(gold), _ratio(answer)
    if left is None or right is None:
        return None if "\\" in gold + answer else False
    if len(left) != len(right):
        return False
    return all(
        same_value(("div", a, left[-1]), ("div", b, right[-1]), Fraction(1), context)
        for a, b in zip(left[:-1], right[:-1], strict=True)
    )


def _ratio(text: str) -> list[Tree] | None:
    parts = []
    if _TIME.match(text) and ":0" in text:
        return None
    for part in text.split(":"):
        try:
            parts.append(read(tokenise(part.strip())))
        except Unreadable:
            return None
    return parts if len(parts) > 1 else [*parts, ("num", Fraction(1))]


def _clock(gold: re.Match[str], answer: re.Match[str]) -> bool:
    def seconds(match: re.Match[str]) -> int:
        hour = int(match[1])
        half = (match[4] or "").lower()
        if half and hour <= 12:
            hour = hour % 12 + (12 if half == "p" else 0)
        return (hour * 60 + int(match[2] or 0)) * 60 + int(match[3] or 0)

    if bool(gold[4]) != bool(answer[4]) and gold[1] == answer[1] and int(gold[1]) <= 12:
        return all((gold[n] or "00") == (answer[n] or "00") for n in (2, 3))
    return seconds(gold) == seconds(answer)


def _based(gold: str, answer: str, bases: tuple[re.Match[str] | None, re.Match[str] | None]) -> bool:
    """The digits must agree; one side may omit the base, because the question names it."""
    left, right = bases
    left_digits = left[1] if left else gold.replace(" ", "")
    right_digits = right[1] if right else answer.replace(" ", "")
    if left and right and left[2] != right[2]:
        return False
    return left_digits.lstrip("0").upper() == right_digits.lstrip("0").upper()


def same_value(gold: Tree, answer: Tree, factor: Fraction, context: Context) -> bool:
    """Whether two trees have the same value, in any interpretation of degrees and percent that one side leaves open."""
    left, right = evaluate.symbols(gold), evaluate.symbols(answer)
    if left != right and len(left) == len(right) == 1 and left | right <= _WHOLE and _periodic(gold, answer):
        values = [({name: Fraction(n) for name in left | right}) for n in (0, 1, -7)]
        return all(same_value(evaluate.put(gold, at), evaluate.put(answer, at), factor, context) for at in values)
    for modes in _readings(gold, answer, context.rules):
        if not modes[1] and not _at_least_one(answer if evaluate.contains(gold, "pct") else gold):
            continue
        if _equal(gold, answer, factor, modes, context):
            return True
    return False


_WHOLE = frozenset("kmn")


def _periodic(gold: Tree, answer: Tree) -> bool:
    """Whether both are angles with a multiple of a period, whose letter for any whole number may differ."""
    return evaluate.contains(gold, "pi") and evaluate.contains(answer, "pi")


def _at_least_one(tree: Tree) -> bool:
    """A bare number stands for a percentage only if it is at least 1: 25 for 25%, not 0.5 for 0.5%."""
    try:
        return abs(evaluate.exact(tree, 0)) >= 1
    except (NotRational, Undefined):
        return False


def _readings(gold: Tree, answer: Tree, rules: Rules) -> list[tuple[bool, bool]]:
    degrees, percents = [True], [True]
    if evaluate.contains(gold, "deg") != evaluate.contains(answer, "deg"):
        degrees = [True, False]
    if rules.percent == "either" and evaluate.contains(gold, "pct") != evaluate.contains(answer, "pct"):
        percents = [True, False]
    return [(degree, percent) for degree in degrees for percent in percents]


def _equal(gold: Tree, answer: Tree, factor: Fraction, modes: tuple[bool, bool], context: Context) -> bool:
    letters = evaluate.symbols(gold) | evaluate.symbols(answer)
    rules = context.rules
    try:
        for index in range(3 if letters else 1):
            left = _gold_value(evaluate.exact, gold, index, modes)
            right = evaluate.exact(answer, index, modes) * factor
            if left != right:
                if index and _has_roots(gold, answer):
                    raise NotRational
                return not letters and (
                    (rules.rounded and stands_for(left, right)) or (rules.tolerant and _within(left, right, rules))
                )
        return True
    except (NotRational, Undefined):
        return _equal_numerically(gold, answer, factor, modes, context)


def _has_roots(gold: Tree, answer: Tree) -> bool:
    """Letters under roots stand for positive numbers, unless an absolute value says otherwise."""
    trees = gold, answer
    return any(evaluate.contains(t, "root") or evaluate.has_fractional_power(t) for t in trees) and not any(
        evaluate.contains(t, "abs") for t in trees
    )


def _gold_value(function: Callable[..., Any], tree: Tree, index: int, modes: tuple[bool, bool], *more: Any) -> Any:
    try:
        return function(tree, index, modes, *more)
    except LimitExceeded as error:
        raise GoldLimit from error


def _within(left: Any, right: Any, rules: Rules) -> bool:
    """Whether two numbers, exact or of any precision, real or complex, are as close as the rules require."""
    apart, size = abs(left - right), abs(left)
    if isinstance(size, int | Fraction):
        return bool(apart <= max(Fraction(rules.absolute), Fraction(rules.relative) * size))
    return bool(evaluate._context().isfinite(size) and apart <= max(rules.absolute, rules.relative * size))


def _equal_numerically(gold: Tree, answer: Tree, factor: Fraction, modes: tuple[bool, bool], context: Context) -> bool:
    rules, letters = context.rules, evaluate.symbols(gold) | evaluate.symbols(answer)
    with enough_digits(gold, answer) as close:
        scale = evaluate._context().mpf(factor.numerator) / factor.denominator
        decided = 0
        for index in range(4 if letters else 1):
            try:
                left = _gold_value(evaluate.numeric, gold, index, modes)
                right = evaluate.numeric(answer, index, modes) * scale
            except Undefined:
                continue
            decided += 1
            if not close(left, right):
                return rules.tolerant and not letters and _within(left, right, rules)
        if decided and letters and (evaluate.contains(gold, "abs") or evaluate.contains(answer, "abs")):
            try:
                left = _gold_value(evaluate.numeric, gold, 4, modes, True)
                return close(left, evaluate.numeric(answer, 4, modes, True) * scale)
            except Undefined:
                return True
    return True if decided else context.symbolic(context.gold, context.answer)
