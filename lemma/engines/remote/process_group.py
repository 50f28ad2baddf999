"""Ending a server with everything it started, its shared memory included."""

from __future__ import annotations

import contextlib
import os
import signal
import time

TRACKER = "multiprocessing.resource_tracker"
END_SECONDS = 10.0


def kill_group(group: int) -> None:
    """Kill all processes of a group, the calling one last if it is among them.

    Shared memory outlives a process that is killed. Python's resource tracker removes it once the processes that it
    works for are gone, and then ends by itself: it gets the time for that.
    """
    end = time.monotonic() + END_SECONDS
    while (members := _members(group)) and time.monotonic() < end:
        for pid, is_tracker in members.items():
            if not is_tracker and pid != os.getpid():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if os.getpid() in members and all(tracks or pid == os.getpid() for pid, tracks in members.items()):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _members(group: int) -> dict[int, bool]:
    """The living processes of a group, and which of them are resource trackers."""
    import psutil

    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid] = any(TRACKER in part for part in process.cmdline())
    return found
