"""Errors that say only that the system gives no more: of memory, or of threads."""

from __future__ import annotations

import sys

# What torch says where the memory of the host is at its end, and the loader of libraries.
_WORDS = (
    "can't allocate memory",
    "not enough memory: you tried to allocate",
    "failed to map segment from shared object",
)
_FIX = (
    "raise the limit (`ulimit -v`, or that of the container or the job), or compute less at a time "
    "(`batch.token_budget`)"
)


def exhaustion(error: Exception) -> str | None:
    """A sentence about such an error, with what helps; None for any other."""
    first = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, RuntimeError) and first == "can't start new thread":
        return (
            "the system starts no more threads for this process; raise the limits on processes and memory "
            "(`ulimit -u`, `ulimit -v`)"
        )
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return None  # of a GPU, of which the one who wanted it knows more
    is_told = isinstance(error, RuntimeError | ImportError) and any(words in first for words in _WORDS)
    if isinstance(error, MemoryError) or is_told:
        told = f" ({first[:200]})" if first else ""
        return f"the system gives this process no more memory{told}; {_FIX}"
    return None
