"""One worker process: its environments take orders on standard input and answer on standard output.

Run as `python -m lemma.environments.worker_main`. Two processes start; the first only watches. When the trainer is gone
or asks for it, it kills the second and everything that was started there.
"""

from __future__ import annotations

import importlib
import os
import queue
import select
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import FrameType
from typing import Any

from lemma.core.descendants import PAUSE_SECONDS, adopt_orphans, end_descendants, fork, reap
from lemma.environments import ENVIRONMENTS
from lemma.environments.environment import EnvironmentOptions
from lemma.environments.order_frames import answer_to_wire, order_from_wire, pack, unpack
from lemma.environments.room import Room, WorldAnswer, WorldOrder

PR_SET_PDEATHSIG = 1
# Time limit for closing worlds once the trainer is gone, and seconds between checks for that.
CLOSING_SECONDS = 5.0
LOOK_SECONDS = 0.5


class Watcher:
    """Waits for the end of a worker, or for a reason to kill it. Signals wake it up."""

    def __init__(self) -> None:
        self.parent, self._is_asked = os.getppid(), False
        self._woken, wake = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._ask)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        adopt_orphans()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._is_asked = True

    def watch(self, child: int) -> int:
        """Wait until the worker has ended, the trainer asks for the end, or the trainer is gone and the time for
        closing worlds is over. Kills everything that is left; returns the worker's exit status."""
        poll = select.poll()
        poll.register(0, 0)  # reports only that the other end was closed
        poll.register(self._woken, select.POLLIN)
        closing = status = None
        while (status := reap(child)) is None and not self._is_asked:
            if closing is None:
                events = dict(poll.poll(LOOK_SECONDS * 1000))
                with suppress(BlockingIOError):
                    os.read(self._woken, 4096)
                if 0 in events or os.getppid() != self.parent:
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


def _begin_worker(watcher: int) -> None:
    """In the worker: its own process group, default signals, and death with the watcher."""
    os.setpgid(0, 0)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if sys.platform == "linux":
        import ctypes

        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != watcher:
        os._exit(1)


class Wire:
    """Answers are written one at a time; a thread reads orders, so that the end of the trainer is noticed
    immediately."""

    def __init__(self) -> None:
        self._in, self._out = os.dup(0), os.dup(1)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1):  # environments must not write answers or read orders
            os.dup2(nowhere, number)
        os.close(nowhere)
        self._lock = threading.Lock()
        self.orders: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def send(self, content: Any) -> None:
        data = memoryview(pack(content))
        with self._lock:
            while data:
                data = data[os.write(self._out, data) :]

    def say(self, answer: WorldAnswer) -> None:
        self.send(answer_to_wire(answer))

    def _listen(self) -> None:
        buffer = bytearray()
        while data := os.read(self._in, 65536):
            buffer += data
            for row in unpack(buffer):
                self.orders.put(row)
        self.orders.put(None)


def make_options(row: dict[str, Any]) -> EnvironmentOptions:
    """The trainer's options: their class by its registered name, or else by its module."""
    module, name = row["class"]
    found = ENVIRONMENTS.find(row["options"]["name"]) if row["by_name"] else None
    kind = found or getattr(importlib.import_module(module), name)
    return kind.model_validate(row["options"])


def serve() -> None:
    wire = Wire()
    first = wire.orders.get()
    if first is None:
        return
    room = Room(make_options(first), is_worker=True)
    wire.send({"ready": os.getpid()})

    def perform(order: WorldOrder) -> None:
        with suppress(BrokenPipeError):
            room.perform(order, wire.say)

    threads = ThreadPoolExecutor(first["at_once"]) if first["at_once"] > 1 else None
    while (row := wire.orders.get()) is not None:
        order = order_from_wire(row)
        if threads is None:
            perform(order)
        else:
            threads.submit(perform, order)
    room.close()
    os._exit(0)  # without waiting for threads


def main() -> None:
    watcher = Watcher()
    own = os.getpid()
    child = fork()
    if child == 0:
        _begin_worker(own)
        serve()
        return
    os.close(1)
    os._exit(os.waitstatus_to_exitcode(watcher.watch(child)) & 0xFF)


if __name__ == "__main__":
    main()
