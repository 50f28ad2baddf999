"""The system message that a stage was trained with, if its rows had one: a file next to the stage's models."""

from __future__ import annotations

from pathlib import Path

from lemma.core.files import from_json

PROMPT_FILE = "prompt.json"


def trained_system(folder: Path) -> str | None:
    """The system message from a stage's rows, or of an exported model; None if there was none."""
    try:
        return from_json((folder / PROMPT_FILE).read_text(encoding="utf-8")).get("system")
    except (OSError, ValueError, AttributeError):
        return None
