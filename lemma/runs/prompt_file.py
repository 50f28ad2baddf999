"""The system message that a stage was trained with where its rows brought one: a file next to the stage's models."""

from __future__ import annotations

import json
from pathlib import Path

PROMPT_FILE = "prompt.json"


def trained_system(folder: Path) -> str | None:
    """The system message that a stage's rows brought, or an exported model's; None where they brought none."""
    try:
        return json.loads((folder / PROMPT_FILE).read_text(encoding="utf-8")).get("system")
    except (OSError, ValueError, AttributeError):
        return None
