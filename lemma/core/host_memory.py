"""How much memory this process may use: the machine's, or less where a container or a batch system sets a limit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath


def host_memory() -> int:
    """In bytes. The same at every call on a machine: what is free at the moment does not count."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(total, memory_limit() or 2**63)


def memory_limit(root: Path = Path("/")) -> int | None:
    """The lowest limit that a control group sets for this process, of version 1 or 2; None where there is none."""
    groups = root / "sys/fs/cgroup"
    limits: list[int] = []
    for names, path in _memberships(root / "proc/self/cgroup"):
        if "memory" in names:
            limits += _limits(groups / "memory", path, "memory.limit_in_bytes")
        elif not any(names):
            for place in (groups, groups / "unified"):
                limits += _limits(place, path, "memory.max")
    return min(limits, default=None)


def _memberships(file: Path) -> Iterator[tuple[list[str], PurePosixPath]]:
    """The controllers of each hierarchy, of which version 2 names none, and the group in it."""
    with suppress(OSError):
        for line in file.read_text(errors="surrogateescape").splitlines():
            if line.count(":") >= 2:
                _, names, path = line.split(":", 2)
                yield names.split(","), PurePosixPath(path.lstrip("/"))


def _limits(place: Path, path: PurePosixPath, name: str) -> Iterator[int]:
    """Limits of a group and of all above it. A container may see its own group at the top, under another path."""
    for group in (path, *path.parents):
        # `max` in version 2; version 1 has a number that no machine reaches.
        with suppress(OSError, ValueError):
            yield int((place / group / name).read_text())
