"""Several files at a time: those of one folder that appear together, or not at all."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from lemma.core.files import hidden_path, sync_folder, write_synced

# Files that are written, hashed or synced side by side.
AT_ONCE = 8


def sync_file(path: Path) -> None:
    """Have what was written to this file on the disk."""
    with open(path, "rb") as handle:
        os.fsync(handle.fileno())


class WholeFiles:
    """Files of one folder that are written together, within `with`: at its end they get their names, and the last one
    gets its name only when all the others are complete and on the disk, even after a power cut. If it is left by an
    exception, none gets its name.

    Each is written and synced in a thread of its own: disks sync several files in little more than the time of one,
    and the next is computed meanwhile.
    """

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._threads = folder, ThreadPoolExecutor(AT_ONCE, thread_name_prefix="writing")
        self._written: list[tuple[Path, Path, Future[None]]] = []

    def write(self, name: str, data: bytes | str) -> None:
        path = self._folder / name
        temporary = hidden_path(path)
        self._written.append((temporary, path, self._threads.submit(write_synced, temporary, data)))

    def __enter__(self) -> WholeFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        try:
            self._threads.shutdown()
            if kind is None:
                self._give_names()
        finally:
            self._threads.shutdown(cancel_futures=True)  # an interrupt may have ended the wait for them
            for temporary, _, _ in self._written:
                temporary.unlink(missing_ok=True)

    def _give_names(self) -> None:
        for _, _, synced in self._written:
            synced.result()
        for part in filter(None, (self._written[:-1], self._written[-1:])):
            for temporary, path, _ in part:
                os.replace(temporary, path)
            sync_folder(self._folder)
