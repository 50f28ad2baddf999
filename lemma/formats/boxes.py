"""Answers in a box: found in a completion, and put into a target."""

from __future__ import annotations

from lemma.formats.tags import BOX, Parsed, unboxed
from lemma.grading.extract import closing_brace


def parse_boxed(text: str) -> Parsed:
    """The last box is the answer, and the text before it the reasoning; a box that is never closed does not count."""
    starts = list(BOX.finditer(text))
    if not starts:
        return Parsed(text.strip(), None, ("no_answer",))
    last, reasoning = starts[-1], text[: starts[-1].start()].strip()
    end = closing_brace(text, last.end() - 1)
    if end < 0:
        return Parsed(reasoning, None, ("no_closing_tag",))
    box = text[last.end() : end + 1]
    faults = [] if all(text.startswith(box, start.end()) for start in starts) else ["several_answers"]
    content = box[:-1].strip()
    if not content:
        faults.append("no_answer")
    return Parsed(reasoning, content or None, tuple(faults))


def compose_boxed(reasoning: str, answer: str) -> str:
    """Reasoning, then the answer in a box, unless the last box of the reasoning already contains it."""
    if BOX.search(reasoning) and unboxed(reasoning) == answer:
        return reasoning
    box = f"\\boxed{{{answer}}}"
    return f"{reasoning}\n\n{box}" if reasoning else box
