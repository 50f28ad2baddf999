"""A worker from inside: `python -m lemma.children.child_main MODULE:FUNCTION PARENT [watched]`.

If it is watched, two processes start. The first only watches: when the parent is gone or asks for the end, it kills the
second and everything that was started there.
"""

from __future__ import annotations

import importlib
import math
import os
import select
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from lemma.children.child_frames import pack, receive
from lemma.core.descendants import adopt_orphans, end_descendants, fork, reap

PR_SET_PDEATHSIG = 1
# Time in which a worker may end by itself once the parent is gone, and seconds between checks for that.
CLOSING_SECONDS = 5.0
LOOK_SECONDS = 0.5


class Channel:
    """Messages from and to the parent. What else runs in this process reads nothing on standard input, and what it
    prints goes to stderr."""

    def __init__(self) -> None:
        self._in, self._out = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
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
        data = pack(message)
        with self._lock, suppress(BrokenPipeError):
            self._out.write(data)
            self._out.flush()


def watched(parent: int) -> int:
    """Go on in a process of its own, with its own group and default signals, whose parent this one is. This one waits
    until that has ended, the parent asks for the end, or the parent is gone and the time for closing is over; then it
    kills everything that is left."""
    asked: list[int] = []
    woken, wake = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    adopt_orphans()
    own, child = os.getpid(), fork()
    if child == 0:
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return own
    os.close(1)
    poll, until = select.poll(), math.inf
    poll.register(0, 0)  # reports only that the other end was closed
    poll.register(woken, select.POLLIN)
    while (status := reap(child)) is None and not asked and time.monotonic() < until:
        events = dict(poll.poll(LOOK_SECONDS * 1000))
        with suppress(BlockingIOError):
            os.read(woken, 4096)
        if until == math.inf and (0 in events or os.getppid() != parent):
            until = time.monotonic() + CLOSING_SECONDS
            poll.unregister(0)
    if status is None:
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
    end_descendants()
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


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
