"""What was written, by size and hash, so that a damaged file is found before anything is learnt from it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lemma.core.whole_files import AT_ONCE, sync_file

CARD = "README.md"


def fingerprint(path: Path) -> dict[str, Any]:
    with open(path, "rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def sync_and_mark(folder: Path) -> dict[str, dict[str, Any]]:
    """Have all files of a folder on the disk, and the fingerprints of those that are not for people to change, as a
    model card is, by their path in it."""

    def mark(path: Path) -> dict[str, Any] | None:
        found = None if path.name == CARD else fingerprint(path)
        sync_file(path)
        return found

    files = sorted(path for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor(AT_ONCE) as threads:
        marks = zip(files, threads.map(mark, files), strict=True)
        return {path.relative_to(folder).as_posix(): found for path, found in marks if found is not None}


def find_damage(folder: Path, files: Mapping[str, Any]) -> str | None:
    """What is wrong with the first of these files that is not as it was written."""

    def damage(name: str) -> str | None:
        if not (folder / name).is_file():
            return f"{name} is missing"
        return None if fingerprint(folder / name) == files[name] else f"{name} is not what was written"

    with ThreadPoolExecutor(AT_ONCE) as threads:
        return next(filter(None, threads.map(damage, files)), None)
