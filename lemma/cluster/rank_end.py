"""How a program ends while others may still be at work: ranks after an error, threads after Ctrl-C."""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress

INTERRUPTED = 130


def ended_as_rank(work: Callable[[], int]) -> int:
    """The exit code of a program. Where it has left its process groups as they are, because something went wrong, this
    ends the process: taking them down would wait for ranks that are gone, and their threads may abort it instead. So it
    does where it was interrupted: a thread of torch that is at work when Python ends aborts the process."""
    try:
        code = work()
    except Exception:
        if not _is_in_group():
            raise
        traceback.print_exc()
        code = 1
    if _is_in_group() or code == INTERRUPTED:
        atexit._run_exitfuncs()
        for output in (sys.stdout, sys.stderr):
            with suppress(OSError):  # Ctrl-C also ends a program that our output is piped to
                output.flush()
        os._exit(code)
    return code


def _is_in_group() -> bool:
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and dist.is_initialized()
