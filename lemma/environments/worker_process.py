"""The trainer's side of one worker process. Nothing here blocks, except waiting for its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from lemma.environments.environment import EnvironmentOptions
from lemma.environments.order_frames import NotAFrame, answer_from_wire, order_to_wire, pack, unpack
from lemma.environments.process_session import end_session
from lemma.environments.room import WorldAnswer, WorldOrder

# Bytes of a worker's stderr that are kept, bytes read for an error message, and characters that the message shows.
MOST_KEPT, LAST_BYTES, SHOWN = 2**20, 2**14, 300
END_SECONDS = 5.0


class WorkerLost(Exception):
    """The worker died, or wrote something that is not an answer."""


class WorkerProcess:
    """A process with environments. Pipes are non-blocking, in both directions."""

    def __init__(self, options: EnvironmentOptions):
        self._stderr = tempfile.TemporaryFile("a+b")
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "lemma.environments.worker_main"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            start_new_session=True,
            # The order of sets must be the same in a worker that replaces this one.
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                "PYTHONHASHSEED": "0",
            },
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.sending, self.hearing = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self.sending, False)
        os.set_blocking(self.hearing, False)
        self.is_ready = self.is_speaking = False
        """Whether it is ready for orders; whether part of an answer has just arrived."""
        self._in, self.out = bytearray(), bytearray()
        self.out += pack(_introduction(options))

    def send(self, order: WorldOrder) -> None:
        self.out += pack(order_to_wire(order))
        self.write()

    def write(self) -> None:
        """Write as much as the pipe accepts now."""
        try:
            while self.out:
                del self.out[: os.write(self.sending, self.out)]
        except BlockingIOError:
            pass
        except OSError as error:
            raise WorkerLost(self.last_words()) from error

    def read(self) -> Iterator[WorldAnswer]:
        """The answers that have arrived."""
        is_over, before = False, len(self._in)
        try:
            while data := os.read(self.hearing, 2**20):
                self._in += data
            is_over = True
        except BlockingIOError:
            pass
        try:
            for row in unpack(self._in):
                if "ready" in row:
                    self.is_ready = True
                else:
                    yield answer_from_wire(row)
        except (NotAFrame, TypeError) as error:
            raise WorkerLost("it wrote what is no answer") from error
        self.is_speaking = bool(self._in) and len(self._in) != before
        if is_over:
            raise WorkerLost(self.last_words())
        if os.fstat(self._stderr.fileno()).st_size > MOST_KEPT:
            self._stderr.truncate(0)

    def last_words(self) -> str:
        """How it ended, with the last line of its stderr."""
        self._stop()
        code = self.process.returncode
        how = f"signal {256 - code}" if code is not None and code > 128 else f"exit code {code}"
        self._stderr.seek(-min(LAST_BYTES, self._stderr.seek(0, os.SEEK_END)), os.SEEK_END)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return f"{how}: {lines[-1][:SHOWN]}" if lines else how

    def end(self) -> None:
        """Kill it and everything it started."""
        self._stop()
        self._stderr.close()

    def _stop(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        with suppress(ProcessLookupError):
            self.process.terminate()
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.returncode < 0:  # its watcher was killed and could not kill the rest
            end_session(self.process.pid)

    def forget(self) -> None:
        """In a forked child: close the pipes without touching the worker."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        self.process.returncode = -signal.SIGKILL


def _introduction(options: EnvironmentOptions) -> dict[str, Any]:
    """What a worker needs to build the same options."""
    from lemma.environments import ENVIRONMENTS

    kind = type(options)
    return {
        "options": options.model_dump(mode="json", by_alias=True),
        "class": [kind.__module__, kind.__qualname__],
        "by_name": ENVIRONMENTS.find(options.name) is kind,
        "at_once": options.calls_at_once,
    }
