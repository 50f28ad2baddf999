r"""Finding \boxed{...} in a completion, with balanced braces."""

from __future__ import annotations

import re

_START = re.compile(r"\\boxed\s*\{")


def _closing(text: str, start: int) -> int | None:
    """Where the brace closes whose content begins at `start`; escaped braces are text."""
    depth, place = 1, start
    while place < len(text):
        character = text[place]
        if character == "\\":
            place += 1
        elif character in "{}":
            depth += 1 if character == "{" else -1
            if not depth:
                return place
        place += 1
    return None


def boxes(text: str) -> list[tuple[int, str | None]]:
    """Where each outermost box begins, and its content; None for one that never closes, which is the last."""
    found: list[tuple[int, str | None]] = []
    match = _START.search(text)
    while match:
        end = _closing(text, match.end())
        found.append((match.start(), None if end is None else text[match.end() : end].strip()))
        match = _START.search(text, end) if end is not None else None
    return found


def unboxed(answer: str) -> str | None:
    """The content of the last box in an answer, the answer itself where it has none, None where it is not closed."""
    found = boxes(answer)
    return found[-1][1] if found else answer


def last_box(text: str) -> tuple[str | None, str | None, list[str]]:
    """The text in front of the last box, its content, and what is wrong."""
    found = boxes(text)
    if not found:
        return text.strip(), None, ["no_answer"]
    place, content = found[-1]
    faults = ["several_answers"] if len({inside for _, inside in found}) > 1 else []
    if content is None:
        return text[:place].strip(), None, [*faults, "no_closing_tag"]
    if not content:
        return text[:place].strip(), None, [*faults, "no_answer"]
    return text[:place].strip(), content, faults
