r"""Finding \boxed{...} in a completion, with balanced braces, in time linear in the text."""

from __future__ import annotations

import re

from lemma.formats.format import Parsed
from lemma.grading.extract import closing_brace

_START = re.compile(r"\\boxed\s*\{")


def _closing(text: str, start: int) -> int | None:
    """Position of the closing brace of the content that begins at `start`."""
    end = closing_brace(text, start - 1)
    return None if end < 0 else end


def unboxed(answer: str) -> str | None:
    """The content of the last box; the answer itself if it has no box; None if the last box never closes."""
    starts = list(_START.finditer(answer))
    if not starts:
        return answer
    end = _closing(answer, starts[-1].end())
    return None if end is None else answer[starts[-1].end() : end].strip()


def parse_boxed(text: str) -> Parsed:
    """The last box is the answer, and the text before it the reasoning; a box that is never closed does not count."""
    starts = list(_START.finditer(text))
    if not starts:
        return Parsed(text.strip(), None, ("no_answer",))
    last, reasoning = starts[-1], text[: starts[-1].start()].strip()
    end = _closing(text, last.end())
    if end is None:
        return Parsed(reasoning, None, ("no_closing_tag",))
    box = text[last.end() : end + 1]
    faults = [] if all(text.startswith(box, start.end()) for start in starts) else ["several_answers"]
    content = box[:-1].strip()
    if not content:
        faults.append("no_answer")
    return Parsed(reasoning, content or None, tuple(faults))


def compose_boxed(reasoning: str, answer: str) -> str:
    """Reasoning, then the answer in a box, unless the last box of the reasoning already contains it."""
    if _START.search(reasoning) and unboxed(reasoning) == answer:
        return reasoning
    box = f"\\boxed{{{answer}}}"
    return f"{reasoning}\n\n{box}" if reasoning else box
