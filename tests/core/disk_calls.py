"""What a piece of code asks of the disk, in order."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock


@contextmanager
def disk_calls(folder: Path) -> Iterator[list[str]]:
    """Within `with`: "sync NAME" for a file below the folder whose content is synced, "name NAME" for one that gets its
    name, and "sync folder". A file that has no name yet is called by the one that it will have."""
    calls: list[str] = []
    sync, replace = os.fsync, os.replace

    def fsync(handle: int) -> None:
        sync(handle)
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if path.is_dir():
            calls.append("sync folder")
        elif folder.resolve() in path.parents:
            hidden = path.name.startswith(".") and path.suffix == ".tmp"
            calls.append(f"sync {path.name[1:].rsplit('.', 2)[0] if hidden else path.name}")

    def named(old: Any, new: Any) -> None:
        replace(old, new)
        calls.append(f"name {Path(new).name}")

    with mock.patch.object(os, "fsync", fsync), mock.patch.object(os, "replace", named):
        yield calls
