"""Lets a process kill all descendants, whatever process groups and sessions they made: a watcher, or a command that
ends."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
import warnings
from contextlib import suppress
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
# Time limit for processes that start others while they are killed, and seconds between rounds.
END_SECONDS, PAUSE_SECONDS = 5.0, 0.02
# How often a session is looked through, since a process may start another while they are killed.
ROUNDS = 5


def adopt_orphans() -> None:
    """From now on, orphaned descendants become children of this process, on Linux."""
    if sys.platform == "linux":
        import ctypes

        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def fork() -> int:
    """Fork, although libraries may have started threads. Python 3.12 warns about that, and the warning would be taken
    for a worker's last error message."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def reap(child: int) -> int | None:
    """Reap all children that have ended; the status of this one, if it is among them."""
    status = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                status = ended[1]
    return status


def end_descendants_at_exit() -> None:
    """When this process ends, kill what code of the user's own has started and not ended. Whoever ends its own children
    at that time registers later, and is called before."""
    import multiprocessing.util  # noqa: F401 (whose own exit waits for children, and comes after this one)

    def end_left_behind() -> None:
        tracker = sys.modules.get("multiprocessing.resource_tracker")  # ends by itself, and tidies up before that
        end_descendants(spare=None if tracker is None else tracker._resource_tracker._pid)

    atexit.register(end_left_behind)


def end_descendants(spare: int | None = None) -> None:
    """Kill every descendant of this process but one."""
    import psutil

    until, own = time.monotonic() + END_SECONDS, psutil.Process()
    try:
        while time.monotonic() < until:
            below = [one for one in own.children(recursive=True) if one.pid != spare]
            if not below:
                break
            for process in below:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(process.pid, signal.SIGKILL)
            time.sleep(PAUSE_SECONDS)
            reap(0)
    except psutil.Error:  # on some machines other processes are not visible
        _end_children()


def _end_children() -> None:
    """Kill the process groups of this process's children, as listed by the kernel."""
    for thread in Path("/proc/self/task").glob("*/children"):
        for child in thread.read_text().split():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(int(child), signal.SIGKILL)
            with suppress(ProcessLookupError, PermissionError):
                os.kill(int(child), signal.SIGKILL)
    reap(0)


def end_session(session: int) -> None:
    """Kill every process of a session, whatever process groups they made in it, except this one."""
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
