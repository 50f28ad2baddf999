"""Sets and lists of names, written as plain text."""

from __future__ import annotations


def names(text: str) -> tuple[str, ...]:
    """The names in a text, in order."""
    return tuple(text.split())
