"""The final answer in a completion. Each way of marking an answer has one rule; the first that applies decides.

If a box or a tag exists, a number elsewhere in the text is never taken instead. Of an answer that is taken back ("Wait,
that is wrong. It is 41."), the last statement counts.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from lemma.grading.languages import is_unspaced, nouns_in
from lemma.grading.limits import MAX_COMPLETION
from lemma.grading.normal_form import repair_escapes
from lemma.grading.notation import without_html
from lemma.grading.residues import read_residues
from lemma.grading.rules import DEFAULT, Rules
from lemma.grading.sentences import asks, concluded, introduced
from lemma.grading.spelt import spelt_number
from lemma.grading.statements import object_first, stated
from lemma.grading.tokens import closing_brace, name_set

_CONTROL = re.compile(r"<\|(?:im_end|im_start|endoftext|eot_id|end_of_text|end|eos)\|>|</s>|<eos>")
_THINK_OPEN = re.compile(r"<(think|thinking|reasoning|start_working_out)>")
_THINK_CLOSE = re.compile(r"</(?:think|thinking|reasoning)>|<end_working_out>")
_CODE = re.compile(r"```(?:python|py|sympy|c|cpp|java|javascript|sql|bash|sh)\b.*?(?:```|$)", re.DOTALL | re.IGNORECASE)
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
_JOIN = re.compile(r"(?<![A-Za-z])(?:and|or)(?![A-Za-z])|[,;]")
# Words that lead from one result to the next, or take one back: only the later box is then the answer.
_STEP = re.compile(
    r"\b(?:then|but|so|thus|hence|therefore|finally|which|giv\w+|simplif\w+|become\w*|wait|actually|not|no|instead|rather"
    r"|correct\w*|kidding|sorry|oops|mistake\w*|meant?|namely|equivalently|i\.e|that is|equal\w*|means)\b",
    re.IGNORECASE,
)
_NEAR = 600
_NEXT_TURN = re.compile(r"\n\W*(?:question|problem|q|user|human|exercise|example|instruction)\b", re.IGNORECASE)
_QUESTION = re.compile(r"\n\W*(?:question|problem|q|user|human|exercise|instruction)\s*\d*\**\s*:", re.IGNORECASE)
_VALUE = re.compile(r"\d|^[A-J]$|\\")
_CLASS_WORDS = re.compile(r"\b(?:congruent|modulo|mod|remainder|multiples?|divisible|form)\b")
_WORD = re.compile(r"(?<![^\W\d_])(?<!\\)[^\W\d_]{2,}")
_TEXT_COMMAND = re.compile(
    r"\\(?:text|mathrm|textbf|mbox|operatorname|mathbf)[a-z]*\s*\{[^{}]*\}|\\(?:begin|end)\s*\{[^{}]*\}(?:\{[^{}]*\})?"
)
_TEXT_WRAP = re.compile(r"\\(?:text|mathrm|textbf|mbox|operatorname|mathbf)[a-z]*\s*\{([^{}]*)\}")
_MATH_WORDS = name_set(
    """
        sin cos tan cot sec csc ln log exp sqrt pi lim min max gcd lcm mod frac dfrac tfrac pmatrix begin end
        and or union interval open lopen ropen
        """
)


_ZEROS = "٠۰०০੦૦୦௦౦೦൦๐０"
_DIGITS = {ord(zero) + digit: str(digit) for zero in _ZEROS for digit in range(10)} | {ord("٫"): ".", ord("٬"): ","}

_AND_A_HALF = re.compile(
    r"(?<![\d.,/])(\d+)((?: [a-z]{2,12})?) (?:and a half|y medi[ao]|et demie?|e mezz[oa]|e mei[ao])\b"
)
_OVERLINED = re.compile("(?:[0-9][\u0304\u0305])+")


class Extraction(NamedTuple):
    """The answer as written, and which rule found it. `answer` is None if there is none."""

    answer: str | None
    method: str


NOTHING = Extraction(None, "none")


def extract(text: str, rules: Rules = DEFAULT) -> Extraction:
    """The final answer of a completion, or the whole text if it is a bare answer."""
    text = visible(repair_escapes(text[-MAX_COMPLETION:]), rules).strip()
    if not text.isascii():
        text = _OVERLINED.sub(lambda m: "\\overline{" + m[0][::2] + "}", text.translate(_DIGITS))
    if any(half in text for half in (" half", " medi", " demi", " mezz", " mei")):
        text = _AND_A_HALF.sub(r"\1.5\2", text)
    if "</su" in text:
        text = without_html(text)
    if not text:
        return NOTHING
    text = _before_next_question(text)
    prose = _CODE.sub(" ", text) if "```" in text else text
    for method in rules.order:
        if method == "tag":
            extraction = _tag(text, rules)
        elif method == "box":
            extraction = _box(text)
        elif method == "hash":
            extraction = _hash(text)
        elif method == "phrase":
            extraction = _phrase(prose)
        else:
            extraction = _short(prose) or _conclusion(prose)
        if extraction is not None:
            return extraction
    return Extraction(text.strip(), "bare") if is_bare(text) else NOTHING


def _before_next_question(text: str) -> str:
    """The text up to where a model that has answered goes on with a question of its own."""
    for turn in _QUESTION.finditer(text):
        said = text[: turn.start()]
        if boxed(said) or "####" in said or stated(said[-8_000:]):
            return said
    return text


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
            if end > boxes[-1][0] or not _joined(between):
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
    later = _NEXT_TURN.split(text[place : place + _NEAR])[0]
    if "nswer" in later and (named := stated(later)) and named[0] and _VALUE.search(named[0]):
        return Extraction(named[0], "phrase")
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
    return text[place + 1 : end], end + 1


def _joined(between: str) -> bool:
    """Whether the words between two boxes make them one list."""
    if not between.strip(" $"):
        return True
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
        extraction = _phrase(inside) or _conclusion(inside)
        inside = (extraction.answer or inside) if extraction else inside
    return Extraction(inside or None, "tag")


def _hash(text: str) -> Extraction | None:
    place = text.rfind("####")
    if place < 0:
        return None
    rest = text[place + 4 :].strip()
    line, _, more = (part.strip() for part in rest.partition("\n"))
    labelled = stated(rest[:1_000]) if nouns_in(line.lower()) else None
    if labelled is None and more and (_is_words(line) or _plain_words(line) > 1):
        return None  # a heading
    return Extraction((labelled[0] if labelled else line) or None, "hash")


def _phrase(text: str, again: bool = True) -> Extraction | None:
    """What the last statement of an answer says, unless it is taken back later."""
    tail = text[-8_000:]
    found = stated(tail)
    if found is None:
        return None
    extraction = Extraction(found[0], "phrase")
    return _unless_retracted(extraction, tail, found[1]) if again else extraction


def _conclusion(text: str) -> Extraction | None:
    found = concluded(text)
    if found is None or found.kind == "choice":
        return None if found is None else Extraction(found.text, "choice")
    return Extraction(found.text, "math" if found.kind == "math" else "number")


def _short(text: str) -> Extraction | None:
    """A text that is itself the answer, or a label, a verb or an adverb with it: "Total: 7", "It must be B"."""
    if "\n" in text.strip("$ \n") or not is_bare(text) or (is_prose(text) and read_residues(text) is None):
        return None
    if _plain_words(text) and (asks(text) or denied(text)):
        return NOTHING
    led = (_plain_words(text) or ":" in text or is_unspaced(text)) and read_residues(text) is None and introduced(text)
    return (_conclusion(text) if led else None) or Extraction(text, "bare")


def _from_sentence(sentence: str) -> str | None:
    """The answer within the sentence that states it."""
    sentence = sentence.strip().strip("*").strip()
    extraction = _conclusion(sentence)
    return object_first(sentence) or (extraction.answer if extraction else None)


def _plain_words(text: str) -> int:
    stripped = _TEXT_COMMAND.sub(" ", text)
    words = [m[0] for m in _WORD.finditer(stripped)]
    return sum(len(w) // 2 if is_unspaced(w) else w.lower() not in _MATH_WORDS for w in words)


def is_prose(text: str) -> bool:
    """Whether a text is sentences rather than an answer: several words outside LaTeX."""
    return _plain_words(text[-4_000:]) >= 3


def is_bare(text: str) -> bool:
    """Whether a text without any answer marker is itself the answer."""
    text = text.strip()
    if not text or len(text) > 2_000 or text.count("\n") > 3:
        return False
    if not is_prose(text) or (_CLASS_WORDS.search(text) and read_residues(text) is not None):
        return True
    return "$" not in text and not any(c.isdigit() for c in text) and len(text) < 300


_LOOKED_BACK = 1_500
_NOT_RIGHT = r"(?:wrong|incorrect|mistaken|not\s+(?:right|correct|true|the\s+answer)|an\s+error)"
_OTHERWISE = (
    r"isn't\s+(?:right|correct)|wasn't\s+(?:right|correct)|made\s+(?:a|an)\s+(?:\w+\s+)?(?:mistake|error)"
    r"|take\s+(?:that|it|this)\s+back|scratch\s+that|never\s*mind|on\s+second\s+thoughts?|correction\b"
)
_CUE = re.compile(
    r"\b(?:wait\b|actually\b|oops\b|however\b|sorry\b|hmm\b|no(?=[,.!:;]|\s+wait)|but\s+(?:the|my|our)\s+(?:\w+\s+)?answer\b"
    rf"|(?:is|was|seems|looks|were|are)\s+{_NOT_RIGHT}|{_OTHERWISE})|'s\s+{_NOT_RIGHT}",
    re.IGNORECASE,
)
_DENIED = re.compile(
    rf"\b(?:(?:that|this|it|which|answer|result|above|i)(?:\s+(?:is|was|were|seems|looks)|'s)\s+{_NOT_RIGHT}|{_OTHERWISE})",
    re.IGNORECASE,
)
# The answer itself is called wrong in its own sentence: \boxed{42} is wrong; not a reason: B, because (C) is wrong.
_DENIED_AT_ONCE = re.compile(
    r"(?:(?!\b(?:because|since|as|so|and|but|for)\b)[^.!?\n;]){1,80}?[\w}$)*]\s+(?:is|was)\s+" + _NOT_RIGHT,
    re.IGNORECASE,
)
_STATED_AFTER = re.compile(
    r"\b(?:answer|result|solution)\b[^.\n]{0,30}?\b(?:is|are|be|equals)\b(?!\s+(?:not|wrong|incorrect|right|correct))"
    r"|\b(?:it|that|this)(?:\s+(?:is|equals|should\s+be|must\s+be|has\s+to\s+be|ought\s+to\s+be|would\s+be)|'s)"
    r"(?:\s+(?:really|actually|in\s+fact))?\s+(?=[$\\(\[*-]*\d|\$|\\[(\[])"
    r"|\bI\s+meant\b|\bcorrection\s*:|\bmake\s+(?:that|it)\b",
    re.IGNORECASE,
)
_FIGURE = re.compile(r"\d|\$|\\[(\[a-z]")
_NEGATED = re.compile(r"(?:\bnot|n't)(?:\s+(?:equal\s+to|the\s+answer))?\s*[$({\[\\]*\s*$", re.IGNORECASE)


def second_thought(text: str, place: int) -> str | None:
    """What is said instead of the answer at `place`: a text with a new one, "" for none; None if it stands.

    A doubt that leads to no other answer ("Wait, let me check") takes nothing back.
    """
    begin = max(place, len(text) - _LOOKED_BACK)
    first = _CUE.search(text, begin)
    if first is None:
        return None
    said = list(_STATED_AFTER.finditer(text, first.start()))
    statement = said[-1] if said else None
    if statement is not None and _FIGURE.search(text, statement.end()):
        return text[statement.end() :]
    denial = _DENIED.search(text, begin) or _DENIED_AT_ONCE.match(text, place)
    return "" if denial is not None and not _FIGURE.search(text, denial.end()) else None


def denied(text: str) -> bool:
    """Whether a short text only says of an answer that it is wrong: (D) is incorrect."""
    return _DENIAL.fullmatch(text) is not None


_DENIAL = re.compile(r"[^.!?\n]{1,60}?\s(?:is|was|are)\s+" + _NOT_RIGHT + r"[.!]?", re.IGNORECASE)


def negated(text: str, place: int) -> bool:
    """Whether the answer at `place` is negated: "the answer is not 42"."""
    return _NEGATED.search(text[max(0, place - 40) : place]) is not None


def doubted(text: str, place: int) -> bool:
    """Whether anything after `place` may take the answer back; a quick check."""
    return _CUE.search(text, max(place, len(text) - _LOOKED_BACK)) is not None
