"""Kills all processes of a session, whatever process groups they made in it."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

# Several rounds, since a process may start another while they are killed.
ROUNDS = 5


def end_session(session: int) -> None:
    """Kill every process of a session except this one."""
    import psutil

    for _ in range(ROUNDS):
        pids = [pid for pid in psutil.pids() if pid != os.getpid() and _session_of(pid) == session]
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not pids:
            return


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None
