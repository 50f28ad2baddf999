"""The parent's side of one worker process: start it, send tasks, read answers with a timeout, kill it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from time import monotonic
from typing import Any

START_SECONDS = 120.0


class WorkerStopped(Exception):
    """The worker died, or was silent for too long without using CPU time."""


class Worker:
    """One worker process and the pipes to it. Owned by the thread that made it: on Linux it dies with that thread."""

    def __init__(self, cpu_seconds: float, megabytes: int):
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "lemma.grading.worker", str(cpu_seconds), str(megabytes), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                "PYTHONHASHSEED": "0",
            },
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        os.set_blocking(self.process.stdin.fileno(), False)
        self.buffer = b""
        self.cpu_limit = cpu_seconds
        """The CPU seconds that the worker allows a task: more than requested on a slow machine."""
        self.is_ready = False
        self._seen = 0.0

    def wait_until_ready(self) -> None:
        """A worker writes one line when it has imported everything."""
        if self.is_ready:
            return
        try:
            self.cpu_limit = float(self.receive(START_SECONDS)["cpu_seconds"])
        except WorkerStopped:
            self.kill()
            raise
        self.is_ready = True

    def send(self, messages: list[dict[str, Any]], seconds: float) -> None:
        assert self.process.stdin is not None
        handle = self.process.stdin.fileno()
        data = memoryview(b"".join(json.dumps(m).encode() + b"\n" for m in messages))
        while data:
            self._wait(handle, seconds, writing=True)
            try:
                data = data[os.write(handle, data) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise WorkerStopped("worker gone") from error

    def receive(self, seconds: float) -> dict[str, Any]:
        """The next answer; raises if the worker is gone, or idle for this many seconds."""
        assert self.process.stdout is not None
        handle = self.process.stdout.fileno()
        while b"\n" not in self.buffer:
            self._wait(handle, seconds)
            data = os.read(handle, 65536)
            if not data:
                raise WorkerStopped("worker gone")
            self.buffer += data
        line, self.buffer = self.buffer.split(b"\n", 1)
        self._seen = self._cpu_time() or 0.0
        answer: dict[str, Any] = json.loads(line)
        return answer

    def answers_within(self, seconds: float) -> bool:
        """Whether the next answer begins to arrive in this time."""
        assert self.process.stdout is not None
        return b"\n" in self.buffer or any(select.select([self.process.stdout], [], [], seconds))

    def _wait(self, handle: int, seconds: float, writing: bool = False) -> None:
        """Wait until the pipe is ready, but at most this many seconds in which the worker uses no CPU time.

        A worker that uses some is slow, not stuck; its own CPU limit ends it.
        """
        used, deadline = self._cpu_time(), monotonic() + seconds
        pipes: tuple[list[int], list[int]] = ([], [handle]) if writing else ([handle], [])
        while not any(select.select(*pipes, [], max(0.0, deadline - monotonic()))):
            now = self._cpu_time()
            if now is None or now == used:
                raise WorkerStopped("worker idle")
            used, deadline = now, monotonic() + seconds

    def _cpu_time(self) -> float | None:
        """CPU seconds of the process so far, also after its death until it is reaped; None if unknown."""
        try:
            with open(f"/proc/{self.process.pid}/stat", "rb") as handle:
                fields = handle.read().rpartition(b")")[2].split()
        except OSError:
            return None
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def hit_cpu_limit(self) -> bool:
        """Whether the process, which is gone, was killed by the CPU limit of its last task; reaps the process."""
        used = self._cpu_time()
        self.kill()
        if self.process.returncode != -signal.SIGXCPU:
            return False
        return used is None or used - self._seen >= self.cpu_limit

    def kill(self) -> None:
        self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        self.process.wait()

    def forget(self) -> None:
        """In a forked child: release the parent's pipes without touching its worker."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                os.close(pipe.fileno())
        self.process.returncode = 0
