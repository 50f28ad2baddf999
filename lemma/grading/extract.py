"""The final answer in a completion. Each way of marking an answer has one rule; the first that applies decides.

If a box or a tag exists, a number elsewhere in the text is never taken instead.
"""

from __future__ import annotations

import re
from collections import deque
from typing import NamedTuple

from lemma.grading.html_marks import without_html
from lemma.grading.limits import MAX_BOX, MAX_COMPLETION
from lemma.grading.names import names
from lemma.grading.normal_form import repair_escapes
from lemma.grading.residues import read_residues
from lemma.grading.rules import DEFAULT, Rules
from lemma.grading.single import spelt_number
from lemma.grading.statements import negated, second_thought

_CONTROL = re.compile(r"<\|(?:im_end|im_start|endoftext|eot_id|end_of_text|end|eos)\|>|</s>|<eos>")
_THINK_OPEN = re.compile(r"<(think|thinking|reasoning|start_working_out)>")
_THINK_CLOSE = re.compile(r"</(?:think|thinking|reasoning)>|<end_working_out>")
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
_JOIN = re.compile(r"(?<![A-Za-z])(?:and|or)(?![A-Za-z])|[,;]")
# Words that lead from one result to the next, or take one back: only the later box is then the answer.
_STEP = re.compile(
    r"\b(?:then|so|thus|hence|therefore|finally|which|giv\w+|simplif\w+|become\w*|wait|actually|not|no|instead|rather"
    r"|correct\w*|namely|equivalently|i\.e|that is|equal\w*|means)\b",
    re.IGNORECASE,
)
_PHRASES = (
    re.compile(r"final answer is:?\s*(.{1,300}?)\.?\s*I hope", re.IGNORECASE | re.DOTALL),
    re.compile(
        r"(?:final answer|correct (?:answer|option|choice)|answer)\s+(?:is|would be|must be|should be|equals)\s*:?\s*"
        r"(?!to\b|found\b|in\b)([^\n]+)",
        re.IGNORECASE,
    ),
    re.compile(r"(?:^|\n|(?<=[.\s*#]))\**(?:final answer|answer|ans|A)\**\s*:\s*\**\s*([^\n]+)", re.IGNORECASE),
    re.compile(r"(?:^|\n)[\s*#]*(?:final answer|answer)[\s*#:]*\n\s*([^\n]+)", re.IGNORECASE),
    re.compile(r"(?:^|\n)\s*answer\s+([^\n]+)", re.IGNORECASE),
    re.compile(r"(?:solution|result)\s+(?:is|equals)\s*:?\s*([^\n.]{1,200})\.?\s*$", re.IGNORECASE),
)  # fmt: skip
_SENTENCE_END = re.compile(r"(?<=[^.\s])\.(?=\s+[A-Z<]|\s*$)")
_CHOICE = re.compile(
    r"(?i:option|choice|choose|pick|select)\s*\(?([A-J])\)?(?![A-Za-z])|\(([A-J])\)[.\s]*$"
    r"|(?<![A-Za-z])\(?([A-J])\)?\s+is\s+(?:the\s+)?(?:correct|right|best)"
)
_MATH = re.compile(
    r"\$\$(.{1,1000}?)\$\$|\\\[(.{1,1000}?)\\\]|\\\((.{1,1000}?)\\\)|(?<![\\\d$])\$([^$\n]{1,1000}?)(?<!\\)\$",
    re.DOTALL,
)
_NUMBER = re.compile(
    r"(?<![A-Za-z\d_.])-?[$€£]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:\.\d+|(?<=\d))(?:/\d+)?\s*(?:\\?%|percent\b)?"
)
_AMOUNT = re.compile(r"\s*\d[\d,]*(?:\.\d+)?(?=[\s.,;:!?*)])")
_MONEY = re.compile(r"(?<![\d$])\$\s?(\d[\d,]*(?:\.\d+)?)(?![\d$]|\s*[-+*/=])")
_COUNTS = re.compile(r"\b(?:after|in|over|for|per|within|every)\s+(?:the\s+|all\s+|each\s+|just\s+)?$", re.IGNORECASE)
_CLASS_WORDS = re.compile(r"\b(?:congruent|modulo|mod|remainder|multiples?|divisible|form)\b")
_STATED = re.compile(r"(?<![\\A-Za-z])(?:is|are|equals?|gets?|gives?)\s+(?:\$|\\[(\[]|-?\.?\d)")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}(?![A-Za-z])")
_TEXT_COMMAND = re.compile(
    r"\\(?:text|mathrm|textbf|mbox|operatorname|mathbf)[a-z]*\s*\{[^{}]*\}|\\(?:begin|end)\s*\{[^{}]*\}(?:\{[^{}]*\})?"
)
_TEXT_WRAP = re.compile(r"\\(?:text|mathrm|textbf|mbox|operatorname|mathbf)[a-z]*\s*\{([^{}]*)\}")
_MATH_WORDS = frozenset(
    names(
        """
        sin cos tan cot sec csc ln log exp sqrt pi lim min max gcd lcm mod frac dfrac tfrac pmatrix begin end
        and or union interval open lopen ropen
        """
    )
)


class Extraction(NamedTuple):
    """The answer as written, and which rule found it. `answer` is None if there is none."""

    answer: str | None
    method: str


NOTHING = Extraction(None, "none")


def extract(text: str, rules: Rules = DEFAULT, prompt: str | None = None) -> Extraction:
    """The final answer of a completion, or the whole text if it is a bare answer."""
    if prompt and text.startswith(prompt):
        text = text[len(prompt) :]
    if len(text) > MAX_COMPLETION:
        text = text[-MAX_COMPLETION:]
    text = visible(repair_escapes(text), rules).strip()
    if "</su" in text:
        text = without_html(text)
    if not text:
        return NOTHING
    for method in rules.order:
        if method == "tag":
            extraction = _tag(text, rules)
        elif method == "box":
            extraction = _box(text)
        elif method == "hash":
            extraction = _hash(text)
        elif method == "phrase":
            extraction = _phrase(text)
        elif method == "choice":
            extraction = _choice(text) if is_prose(text) else None
        elif ("\n" not in text and is_bare(text)) or _is_formula(text):
            return Extraction(text.strip(), "bare")
        else:
            extraction = _last_maths_or_number(text, method == "math")
        if extraction is not None:
            return extraction
    return Extraction(text.strip(), "bare") if is_bare(text) else NOTHING


def visible(text: str, rules: Rules) -> str:
    """The part of a completion that is graded: after the thinking part, before control tokens and a next turn."""
    if "<|" in text or "</s>" in text or "<eos>" in text:
        cut = _CONTROL.search(text)
        while cut and not text[: cut.start()].strip():
            text = text[cut.end() :]
            cut = _CONTROL.search(text)
        if cut:
            text = text[: cut.start()]
    if rules.thinking == "after" and "<" in text:
        closes = [m.end() for m in _THINK_CLOSE.finditer(text)] if ("</" in text or "<end_" in text) else []
        if closes:
            return text[closes[-1] :]
        opened = _THINK_OPEN.search(text)
        if opened:
            return text[: opened.start()]
    return text


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


def boxed(text: str) -> Extraction | None:
    """The last balanced box; boxes joined by "and", "or" or a comma count as one list. None without any box."""
    if "\\boxed" not in text and "\\fbox" not in text:
        return None
    starts = [(m.start(), m.end()) for m in _BOX.finditer(text)][-64:]
    boxes: list[tuple[int, int, str]] = []
    for begin, after in reversed(starts):
        if boxes and begin + 1 > boxes[-1][0]:
            continue
        inside = _box_content(text, after)
        if inside is None:
            continue
        content, end = inside
        if not content.strip():
            continue
        if boxes:
            between = text[end : boxes[-1][0]]
            if not _joined(between):
                break
        boxes.append((begin, end, content.strip()))
    if not boxes:
        return Extraction(None, "box")
    contents: list[str] = []
    for _, _, content in reversed(boxes):
        if content not in contents:
            contents.append(content)
    if not _is_words(contents[-1]):
        contents = [content for content in contents if not _is_words(content)]
    return Extraction(", ".join(contents), "box")


def _is_words(content: str) -> bool:
    """A box that says something, "Yes" or "Case 1", rather than giving a value; spelt numbers are values."""
    plain = _TEXT_WRAP.sub(r" \1 ", content).strip()
    first = _WORD.match(plain)
    return first is not None and first[0].lower() not in _MATH_WORDS and spelt_number(plain) is None


def _box(text: str) -> Extraction | None:
    """The last box, unless it is denied or something else is said later."""
    extraction = boxed(text)
    if extraction is None or extraction.answer is None:
        return extraction
    place = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    return Extraction(None, "box") if negated(text, place) else _unless_retracted(extraction, text, place)


def _unless_retracted(extraction: Extraction, text: str, place: int) -> Extraction:
    """What was found at a position, or what replaces it later in the text."""
    later = second_thought(text, place)
    if later is None:
        return extraction
    return _phrase(later, again=False) or Extraction(_from_sentence(later), extraction.method)


def _box_content(text: str, after: int) -> tuple[str, int] | None:
    place = after
    while place < len(text) and text[place] in " \t\n":
        place += 1
    if place >= len(text):
        return None
    if text[place] != "{":
        match = re.compile(r"-?\w+").match(text, place)
        return (match[0], match.end()) if match and place <= after + 1 else None
    end = closing_brace(text, place)
    if end < 0:
        return None
    content = text[place + 1 : end]
    nested = _BOX.match(content.strip())
    if nested:
        inner = _box_content(content.strip(), nested.end())
        content = inner[0] if inner else content
    return content, end + 1


def _joined(between: str) -> bool:
    """Whether the words between two boxes make them one list."""
    plain = re.sub(r"\\(?:quad|qquad|text|[,;:()\[\]])|[${}\\]", " ", between)
    if len(between) >= 60 or "\n\n" in between or ". " in plain or _STEP.search(plain):
        return False
    return _JOIN.search(plain) is not None


def _tag(text: str, rules: Rules) -> Extraction | None:
    if "<" not in text:
        return None
    best = max(((text.rfind(f"<{name}>"), name) for name in rules.tags), default=(-1, ""))
    place, name = best
    if place < 0:
        return None
    inside = text[place + len(name) + 2 :].partition(f"</{name}>")[0]
    box = boxed(inside)
    if box is not None:
        return Extraction(box.answer, "tag")
    inside = inside.strip()
    if inside and not is_bare(inside):
        extraction = _phrase(inside) or _last_maths_or_number(inside, True) or _last_maths_or_number(inside, False)
        inside = (extraction.answer or inside) if extraction else inside
    return Extraction(inside or None, "tag")


def _hash(text: str) -> Extraction | None:
    place = text.rfind("####")
    if place < 0:
        return None
    line = text[place + 4 :].strip().partition("\n")[0].strip()
    return Extraction(line or None, "hash")


def _phrase(text: str, again: bool = True) -> Extraction | None:
    """After "the answer is", "Answer:", and the like: the last such phrase, one sentence of it."""
    tail = text[-8_000:]
    for pattern in _PHRASES:
        match = _last_start(pattern, tail)
        if match is not None:
            formula = _MATH.match(tail, match.start(1))
            if formula is not None and "\n" in formula[0]:
                return Extraction(_inside(formula), "phrase")
            extraction = Extraction(_from_sentence(match[1]), "phrase")
            return _unless_retracted(extraction, tail, match.start(1)) if again else extraction
    return None


def _last_start(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """The match that begins last, even inside the one before."""
    last, match = None, pattern.search(text)
    while match is not None:
        last, match = match, pattern.search(text, match.start(1))
    return last


def _inside(formula: re.Match[str]) -> str:
    return next(group for group in formula.groups() if group is not None).strip()


def _from_sentence(sentence: str) -> str | None:
    """The answer within the sentence that states it."""
    end = _SENTENCE_END.search(sentence)
    sentence = (sentence[: end.start()] if end else sentence).strip().strip("*").strip()
    if is_bare(sentence):
        return sentence or None
    extraction = _last_maths_or_number(sentence, True) or _last_maths_or_number(sentence, False)
    return extraction.answer if extraction else sentence or None


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    return next(iter(deque(pattern.finditer(text), maxlen=1)), None)


def _choice(text: str) -> Extraction | None:
    last = _last(_CHOICE, text[-2_000:])
    if last is None:
        return None
    return Extraction(last[1] or last[2] or last[3], "choice")


def _last_maths_or_number(text: str, maths: bool) -> Extraction | None:
    """The last formula or the last number, whichever ends later; the formula if it contains the number."""
    tail = text[-8_000:]
    formula, number = _last_formula(tail), _last(_NUMBER, tail)
    if maths and formula is not None and (number is None or formula.end() >= number.end()):
        after = re.match(r"\s*(?:\\?%|percent\b)", tail[formula.end() :])
        return Extraction(_inside(formula) + ("%" if after else ""), "math")
    if number is not None and (not maths or formula is not None or is_prose(text)):
        return Extraction(_amount_before(tail, number) or number[0].strip(), "number")
    return None


def _last_formula(text: str) -> re.Match[str] | None:
    """The last formula between delimiters; a dollar sign before an amount of money does not open one."""
    last, match = None, _MATH.search(text)
    while match is not None:
        money = match[4] is not None and _AMOUNT.match(match[4]) and _plain_words(match[4])
        last = last if money else match
        match = _MATH.search(text, match.start() + 1 if money else match.end())
    return last


def _amount_before(text: str, number: re.Match[str]) -> str | None:
    """The amount of money in a sentence that ends with a duration or a count: "$30 after 3 years"."""
    before = text[max(0, number.start() - 300) : number.start()]
    if "$" not in before or "$" in number[0] or "%" in number[0] or not _COUNTS.search(before):
        return None
    sentence = re.split(r"[.!?]\s|\n", before)[-1]
    amount = _last(_MONEY, sentence)
    return amount[1] if amount else None


def _plain_words(text: str) -> int:
    stripped = _TEXT_COMMAND.sub(" ", text)
    return sum(1 for m in _WORD.finditer(stripped) if m[0].lower() not in _MATH_WORDS)


def is_prose(text: str) -> bool:
    """Whether a text is sentences rather than an answer: several words outside LaTeX."""
    return _plain_words(text[-4_000:]) >= 3


def _is_formula(text: str) -> bool:
    """Whether the whole text is one formula between delimiters, perhaps on several lines."""
    for opening, closing in (("$$", "$$"), ("$", "$"), ("\\[", "\\]"), ("\\(", "\\)")):
        if text.startswith(opening) and text.endswith(closing) and len(text) > 2 * len(opening):
            inside = text[len(opening) : -len(closing)]
            return "$" not in inside and "\\[" not in inside and "\\(" not in inside and not is_prose(inside)
    return False


def is_bare(text: str) -> bool:
    """Whether a text without any answer marker is itself the answer."""
    text = text.strip()
    if not text or len(text) > 2_000 or text.count("\n") > 3:
        return False
    if _STATED.search(text):
        return False
    if not is_prose(text) or (_CLASS_WORDS.search(text) and read_residues(text) is not None):
        return True
    return "$" not in text and not any(c.isdigit() for c in text) and len(text) < 300
