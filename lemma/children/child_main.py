"""A worker from inside: `python -m lemma.children.child_main MODULE:FUNCTION PARENT [watched]`.

If it is watched, two processes start. The first only watches: when the parent is gone or asks for the end, it kills the
second and everything that was started there.
"""

from __future__ import annotations

import importlib
import os
import select
import signal
import sys
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Any

from lemma.children.child_frames import pack, receive
from lemma.core.descendants import PAUSE_SECONDS, adopt_orphans, end_descendants, fork, reap

PR_SET_PDEATHSIG = 1
# Time in which a worker may end by itself once the parent is gone, and seconds between checks for that.
CLOSING_SECONDS = 5.0
LOOK_SECONDS = 0.5


class Channel:
    """Messages from and to the parent. What else runs in this process reads nothing on standard input, and what it
    prints goes to stderr."""

    def __init__(self) -> None:
        self._in, self._out = os.fdopen(os.dup(0), "rb"), os.dup(1)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)
        self._lock = threading.Lock()

    def receive(self) -> Any:
        """The next message; None when the parent has closed its end."""
        try:
            return receive(self._in.read)
        except EOFError:
            return None

    def send(self, message: Any) -> None:
        """From any thread; nothing happens if the parent is gone."""
        data = memoryview(pack(message))
        with self._lock, suppress(BrokenPipeError):
            while data:
                data = data[os.write(self._out, data) :]


class Watcher:
    """Waits for the end of a worker, or for a reason to kill it. Signals wake it up."""

    def __init__(self, parent: int) -> None:
        self._parent, self._is_asked = parent, False
        self._woken, wake = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGTERM, self._ask)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        adopt_orphans()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._is_asked = True

    def watch(self, child: int) -> int:
        """Wait until the worker has ended, the parent asks for the end, or the parent is gone and the worker's time is
        over. Kills everything that is left; returns the worker's exit status."""
        poll = select.poll()
        poll.register(0, 0)  # reports only that the other end was closed
        poll.register(self._woken, select.POLLIN)
        closing = status = None
        while (status := reap(child)) is None and not self._is_asked:
            if closing is None:
                events = dict(poll.poll(LOOK_SECONDS * 1000))
                with suppress(BlockingIOError):
                    os.read(self._woken, 4096)
                if 0 in events or os.getppid() != self._parent:
                    closing = time.monotonic() + CLOSING_SECONDS
            elif time.monotonic() > closing:
                break
            else:
                time.sleep(PAUSE_SECONDS)
        if status is None:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            status = os.waitpid(child, 0)[1]
        end_descendants()
        return status


def watched(parent: int) -> int:
    """Go on in a process of its own, with its own group and default signals, whose parent this one is; the first
    process never returns."""
    watcher, own = Watcher(parent), os.getpid()
    child = fork()
    if child:
        os.close(1)
        os._exit(os.waitstatus_to_exitcode(watcher.watch(child)) & 0xFF)
    os.setpgid(0, 0)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return own


def end_with(parent: int) -> None:
    """Die with this process, even when busy or stopped; on systems other than Linux, a worker only ends with its
    input."""
    if sys.platform == "linux":
        import ctypes

        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    place, parent = sys.argv[1], int(sys.argv[2])
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with(watched(parent) if "watched" in sys.argv[3:] else parent)
    channel = Channel()
    module, _, name = place.partition(":")
    getattr(importlib.import_module(module), name)(channel)
    os._exit(0)  # without waiting for threads


if __name__ == "__main__":
    main()
