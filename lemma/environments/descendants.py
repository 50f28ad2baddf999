"""A process that watches over others ends all that they have started, whatever groups and sessions those made."""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from contextlib import suppress
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
# Seconds in which those that start others while they are ended are ended too, and between two looks at them.
END_SECONDS, PAUSE_SECONDS = 5.0, 0.02


def adopt_orphans() -> None:
    """From here on, a process below this one whose parent ends becomes a child of this one, where Linux allows it."""
    if sys.platform == "linux":
        import ctypes

        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def fork() -> int:
    """Fork a process whose only threads are those of libraries. Python 3.12 warns of them, in words that would be taken
    for the last ones of a worker."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def reap(child: int) -> int | None:
    """Take note of all children that have ended; the status of this one, if it is among them."""
    status = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                status = ended[1]
    return status


def end_descendants() -> None:
    """Kill every process below this one."""
    import psutil

    until, own = time.monotonic() + END_SECONDS, psutil.Process()
    try:
        while (below := own.children(recursive=True)) and time.monotonic() < until:
            for process in below:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(process.pid, signal.SIGKILL)
            time.sleep(PAUSE_SECONDS)
            reap(0)
    except psutil.Error:  # a machine on which nobody sees the processes of others
        _end_children()


def _end_children() -> None:
    """Kill the groups of the children of this process, by what the kernel says of it alone."""
    for thread in Path("/proc/self/task").glob("*/children"):
        for child in thread.read_text().split():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(int(child), signal.SIGKILL)
            with suppress(ProcessLookupError, PermissionError):
                os.kill(int(child), signal.SIGKILL)
    reap(0)
