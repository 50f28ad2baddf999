"""What was written, by size and hash, so that a damaged file is found before anything is learnt from it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CARD = "README.md"


def fingerprint(path: Path) -> dict[str, Any]:
    with open(path, "rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def fingerprints(folder: Path) -> dict[str, dict[str, Any]]:
    """Those of all files in a folder, by their path in it; a model card is for people, who may change it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != CARD)
    return {path.relative_to(folder).as_posix(): fingerprint(path) for path in files}


def find_damage(folder: Path, files: Mapping[str, Any]) -> str | None:
    """What is wrong with the first of these files that is not as it was written."""
    for name, expected in files.items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        if fingerprint(folder / name) != expected:
            return f"{name} is not what was written"
    return None
