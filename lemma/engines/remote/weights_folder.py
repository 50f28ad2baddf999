"""The temporary folder that servers start from. Its process holds a lock; if it is killed, the next one removes the
folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import IO

PREFIX = "lemma-weights-"
# A folder has this prefix until it is locked, so that it is not taken for an abandoned one.
NEW = ".lemma-weights-"
LOCK = ".lock"


class WeightsFolder:
    """Holds a full copy of the weights. The lock is released when the process ends, however it ends."""

    def __init__(self) -> None:
        _remove_abandoned()
        made = Path(tempfile.mkdtemp(prefix=NEW))
        lock = open(made / LOCK, "w")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path = made.with_name(PREFIX + made.name.removeprefix(NEW))
        os.replace(made, self.path)
        self.remove = weakref.finalize(self, _remove, self.path, lock)


def _remove(path: Path, lock: IO[str]) -> None:
    shutil.rmtree(path, ignore_errors=True)
    lock.close()


def _remove_abandoned() -> None:
    """Remove the folders of processes that are gone: a killed process cannot do it itself."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), open(folder / LOCK, "r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
