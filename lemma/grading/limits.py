"""Deterministic limits: what is too long, too deep or too large is refused before anything is computed."""

from __future__ import annotations

MAX_COMPLETION = 4_000_000
"""Characters of a completion that are searched for an answer; for a longer one, only this many at the end."""
MAX_BOX = 20_000
"""Characters within which a box must be closed."""
MAX_ANSWER = 2_000
"""Characters of an extracted answer that is parsed."""
MAX_GOLD = 20_000
"""Characters of a gold text, which may be a whole solution with a box."""
MAX_TOKENS = 1_000
MAX_NESTING = 40
MAX_DIGITS = 1_000
"""Digits of one number."""
MAX_BITS = 100_000
"""Bits of any whole number that the exact path computes."""
MAX_EXPONENT = 20_000
"""Largest exponent or factorial in the numeric path."""
MAX_STEPS = 20_000
"""Nodes that one evaluation may visit."""
MAX_PRECISION = 10_000
"""Digits to which two values are compared."""
MAX_WORK = 400_000
"""Those digits times the number of operations that are slow at high precision."""
MAX_ITEMS = 200
"""Members of a list, set or matrix."""


class LimitExceeded(Exception):
    """Raised if a text exceeds one of the limits above; the verdict depends on whose text it is."""


class GoldLimit(Exception):
    """The gold, not the answer, exceeds a limit."""


def check_shape(text: str, longest: int = MAX_ANSWER) -> None:
    """Refuse texts that are too long or too deeply nested; linear in the length of the text."""
    if len(text) > longest:
        raise LimitExceeded(f"longer than {longest} characters")
    depth = 0
    for character in text:
        if character in "{([":
            depth += 1
            if depth > MAX_NESTING:
                raise LimitExceeded(f"nested deeper than {MAX_NESTING}")
        elif character in "})]" and depth:
            depth -= 1
