"""Errors that Python and its libraries raise where the system lacks or refuses something, as one sentence."""

from __future__ import annotations

import errno
import sys

_REPAIRS = {
    errno.ENOSPC: "free some space and give the same command again",
    errno.EDQUOT: "free some space and give the same command again",
    errno.EACCES: "check who may read and write there",
    errno.EPERM: "check who may read and write there",
    errno.EROFS: "name a folder that can be written",
    errno.EEXIST: "name another folder",
    errno.ENOTDIR: "name a path that does not go through a file",
    errno.EISDIR: "name a file",
}
# What torch says where the memory of the host is at its end, and the loader of libraries.
_NO_MEMORY = (
    "can't allocate memory",
    "not enough memory: you tried to allocate",
    "failed to map segment from shared object",
)


def explained(error: Exception) -> tuple[str, int] | None:
    """A sentence about such an error, with what helps, and the exit code; None for any other."""
    first = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, OSError) and error.errno in _REPAIRS:
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror}{where}; {_REPAIRS[error.errno]}", 2
    if isinstance(error, RuntimeError) and first == "Could not determine home directory.":
        return "the home folder of a path that begins with `~` is not known; write the path in full, or set HOME", 2
    if isinstance(error, RuntimeError) and first == "can't start new thread":
        fix = "raise the limits on processes and memory (`ulimit -u`, `ulimit -v`)"
        return f"the system refused to start another thread; {fix}", 1
    if not _is_of_memory(error, first):
        return None
    told = f" ({first[:200]})" if first else ""
    fix = "raise the limit (`ulimit -v`, or that of the container or the job), or lower `batch.token_budget`"
    return f"out of host memory{told}; {fix}", 1


def _is_of_memory(error: Exception, first: str) -> bool:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return False  # that is the memory of a GPU, of which whoever wanted it knows more
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    is_told = isinstance(error, RuntimeError | ImportError | OSError)
    return is_told and any(words in first for words in _NO_MEMORY)
