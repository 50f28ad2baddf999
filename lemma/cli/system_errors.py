"""Errors that Python and its libraries raise where the system lacks something, as one sentence."""

from __future__ import annotations

import sys

# What torch says where the memory of the host is at its end, and the loader of libraries.
_NO_MEMORY = (
    "can't allocate memory",
    "not enough memory: you tried to allocate",
    "failed to map segment from shared object",
)


def explained(error: Exception) -> tuple[str, int] | None:
    """A sentence about such an error, with what helps, and the exit code; None for any other."""
    first = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, RuntimeError) and first == "Could not determine home directory.":
        return "a path begins with `~` and a name that no user of this machine has; write the path in full", 2
    if isinstance(error, RuntimeError) and first == "can't start new thread":
        fix = "raise the limits on processes and memory (`ulimit -u`, `ulimit -v`)"
        return f"the system starts no more threads for this process; {fix}", 1
    if not _is_of_memory(error, first):
        return None
    told = f" ({first[:200]})" if first else ""
    fix = "raise the limit (`ulimit -v`, or that of the container or the job), or lower `batch.token_budget`"
    return f"the system gives this process no more memory{told}; {fix}", 1


def _is_of_memory(error: Exception, first: str) -> bool:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return False  # that is the memory of a GPU, of which whoever wanted it knows more
    is_told = isinstance(error, RuntimeError | ImportError) and any(words in first for words in _NO_MEMORY)
    return isinstance(error, MemoryError) or is_told
