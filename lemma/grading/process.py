"""The parent's side of one worker process: start it, send tasks, read answers with a deadline, kill it."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from contextlib import suppress
from time import monotonic
from typing import Any

START_SECONDS = 120.0


class Stopped(Exception):
    """The worker died, or was killed because it overran."""


class Worker:
    """One worker process and the pipe to it. Owned by one thread at a time."""

    def __init__(self, cpu_seconds: float, megabytes: int):
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "lemma.grading.worker", str(cpu_seconds), str(megabytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        self.buffer = b""
        self.is_ready = False

    def wait_until_ready(self) -> None:
        """A worker says one line when it has everything imported."""
        if self.is_ready:
            return
        try:
            self.receive(START_SECONDS)
        except Stopped:
            self.kill()
            raise
        self.is_ready = True

    def send(self, messages: list[dict[str, Any]]) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(b"".join(json.dumps(m).encode() + b"\n" for m in messages))
            self.process.stdin.flush()
        except (BrokenPipeError, OSError) as error:
            raise Stopped from error

    def receive(self, seconds: float) -> dict[str, Any]:
        """The next answer; raises where none comes in time or the worker is gone."""
        assert self.process.stdout is not None
        handle, deadline = self.process.stdout.fileno(), monotonic() + seconds
        while b"\n" not in self.buffer:
            left = deadline - monotonic()
            if left <= 0 or not select.select([handle], [], [], left)[0]:
                raise Stopped("wall clock")
            data = os.read(handle, 65536)
            if not data:
                raise Stopped("worker gone")
            self.buffer += data
        line, self.buffer = self.buffer.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def kill(self) -> None:
        self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        self.process.wait()

    def forget(self) -> None:
        """In a forked child: let go of the parent's pipes without touching its worker."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                os.close(pipe.fileno())
        self.process.returncode = 0
