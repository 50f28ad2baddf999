"""The parent's side of a child process: messages over its pipes, time limits, how it ended, and its end with all that
it has started."""

from __future__ import annotations

import math
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

from lemma.children.child_frames import MOST, NotAFrame, pack, unpack
from lemma.core.descendants import end_session

MAIN = "lemma.children.child_main"
# Bytes of a child's stderr that are kept, bytes read for an error message, and characters that the message shows.
MOST_KEPT, LAST_BYTES, SHOWN = 2**20, 2**14, 300


class ChildGone(Exception):
    """The child has ended, or wrote what is no message. Says how it ended, with the last line of its stderr."""


class ChildSilent(ChildGone):
    """The child is there, but did not read or answer in time."""


class Child:
    """A process in a session of its own, and the pipes to it, which do not block.

    Either an event loop waits for `hearing`, and for `sending` while there is something in `out`, and calls `read` and
    `write`; or the caller waits in `tell` and `receive`; or a thread waits, after `listen`. The first message of a
    child is its `greeting`, by which it is ready.

    `end_by` is the signal that ends the child; without one it ends when its input does, and is killed after
    `end_seconds`. Where `is_patient`, time in which the child computes does not count: it is slow, not stuck.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str | None = None,
        stderr: IO[bytes] | None = None,
        end_by: signal.Signals | None = None,
        end_seconds: float = 5.0,
        is_patient: bool = False,
        longest: int = MOST,
    ):
        self._own_stderr = tempfile.TemporaryFile("a+b") if stderr is None else None
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._own_stderr or stderr,
            start_new_session=True,
            cwd=cwd,
            env=env,
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.sending, self.hearing = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self.sending, False)
        os.set_blocking(self.hearing, False)
        self.started = time.monotonic()
        self.greeting: Any = None
        self.is_speaking = False
        """Whether part of a message has just arrived."""
        self.out, self._in = bytearray(), bytearray()
        self.cpu_at_end: float | None = None
        """The CPU seconds that it had used when it ended; None if unknown."""
        self._end_by, self._end_seconds = end_by, end_seconds
        self._is_patient, self._longest = is_patient, longest
        self._is_listened_to = False

    @property
    def is_ready(self) -> bool:
        return self.greeting is not None

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    # Without waiting

    def send(self, message: Any) -> None:
        self.out += pack(message)
        self.write()

    def write(self) -> None:
        """Write as much as the pipe accepts now."""
        assert self.process.stdin is not None
        self._trim_stderr()
        try:
            while self.out:
                if self.process.stdin.closed:  # the number may be another file's by now
                    raise BrokenPipeError
                del self.out[: os.write(self.sending, self.out)]
        except BlockingIOError:
            pass
        except OSError as error:
            raise ChildGone(self.last_words()) from error

    def read(self) -> Iterator[Any]:
        """The messages that have arrived, without the greeting."""
        before, is_over = len(self._in), not self._fill()
        for message in self._messages():
            if self.greeting is None:
                self.greeting = message
            else:
                yield message
        self.is_speaking = bool(self._in) and len(self._in) != before
        if is_over:
            raise ChildGone(self.last_words())

    # Waiting

    def wait_until_ready(self, seconds: float) -> Any:
        """Its greeting. A child that gives none is ended."""
        if not self.is_ready:
            try:
                self.greeting = self.receive(seconds)
            except ChildGone:
                self.end()
                raise
        return self.greeting

    def tell(self, message: Any, seconds: float) -> None:
        """Send a message; the pipe has taken all of it then."""
        self.send(message)
        clock = self._clock(seconds)
        while self.out:
            self._wait(self.sending, select.POLLOUT, clock)
            self.write()

    def receive(self, seconds: float) -> Any:
        """The next message. The time is for all of it: bytes that make none are no reason to wait longer."""
        clock, is_open = self._clock(seconds), True
        while True:
            for message in self._messages():
                return message
            if not is_open:
                raise ChildGone(self.last_words())
            self._wait(self.hearing, select.POLLIN, clock)
            is_open = self._fill()

    def speaks_within(self, seconds: float) -> bool:
        """Whether the next message begins to arrive in this time."""
        return bool(self._in) or _is_ready(self.hearing, select.POLLIN, seconds)

    def listen(self, put: Callable[[Any], None]) -> None:
        """From now on a thread passes on every message, the greeting too, and None at the child's end."""

        def pass_on() -> None:
            is_open = True
            with suppress(OSError, ValueError, ChildGone):  # it was ended meanwhile
                while is_open and _is_ready(self.hearing, select.POLLIN, None):
                    is_open = self._fill()
                    for message in self._messages():
                        self.greeting = self.greeting or message
                        put(message)
            put(None)

        self._is_listened_to = True
        threading.Thread(target=pass_on, daemon=True, name="child").start()

    def cpu_seconds(self) -> float | None:
        """CPU seconds of the process so far, also after its death until it is reaped; None if unknown."""
        try:
            with open(f"/proc/{self.process.pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            return None
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _clock(self, seconds: float) -> _Clock:
        return _Clock(seconds, self.cpu_seconds if self._is_patient else None)

    def _wait(self, file: int, event: int, clock: _Clock) -> None:
        while clock.left <= 0 or not _is_ready(file, event, clock.left):
            if clock.is_over():
                raise ChildSilent("it does not answer")

    def _fill(self) -> bool:
        """Take what is in the pipe; whether more can come."""
        self._trim_stderr()
        try:
            data = os.read(self.hearing, 2**16)
        except BlockingIOError:
            return True
        self._in += data
        return bool(data)

    def _trim_stderr(self) -> None:
        if self._own_stderr and not self._own_stderr.closed and os.fstat(self._own_stderr.fileno()).st_size > MOST_KEPT:
            self._own_stderr.truncate(0)

    def _messages(self) -> Iterator[Any]:
        try:
            yield from unpack(self._in, self._longest)
        except NotAFrame as error:
            raise ChildGone("it wrote what is no message") from error

    # The end

    def last_words(self) -> str:
        """How it ended, with the last line of its stderr; ends it."""
        self._stop()
        code = self.process.returncode
        how = f"signal {-code if code < 0 else 256 - code}" if code < 0 or code > 128 else f"exit code {code}"
        if self._own_stderr is None:
            return f"{how}, and its log says why"
        self._own_stderr.seek(-min(LAST_BYTES, self._own_stderr.seek(0, os.SEEK_END)), os.SEEK_END)
        lines = self._own_stderr.read().decode(errors="replace").strip().splitlines()
        return f"{how}: {lines[-1][:SHOWN]}" if lines else how

    def ask_to_end(self) -> None:
        """Begin to end it, and wait for nothing."""
        if self.process.returncode is None:
            self.cpu_at_end = self.cpu_seconds()
        self._close_pipes()
        if self._end_by is not None:
            self.process.send_signal(self._end_by)

    def end(self) -> None:
        """Kill it and everything it has started."""
        self._stop()
        if self._own_stderr is not None:
            self._own_stderr.close()

    def _stop(self) -> None:
        self.ask_to_end()
        try:
            self.process.wait(self._end_seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self._end_by == signal.SIGTERM and self.process.returncode < 0:  # its watcher could not kill the rest
            end_session(self.process.pid)

    def forget(self) -> None:
        """In a forked process: close the pipes, and leave the child to its parent."""
        self._close_pipes()
        self.process.returncode = 0

    def _close_pipes(self) -> None:
        for pipe in (self.process.stdin, None if self._is_listened_to else self.process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


class PythonChild(Child):
    """A child that runs `function(channel)`, named as `module:function`, in a Python like this one.

    If it is watched, it ends with all that it has started, whatever process groups and sessions that made, and has
    some seconds for it where this process is gone. Otherwise it starts nothing, and on Linux is killed at once with
    the thread that made it.
    """

    def __init__(
        self, place: str, *, is_watched: bool = True, stderr: IO[bytes] | None = None, is_patient: bool = False
    ):
        super().__init__(
            [sys.executable, "-P", "-m", MAIN, place, str(os.getpid()), *["watched"] * is_watched],
            # The order of sets must be the same in a worker that replaces this one.
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                "PYTHONHASHSEED": "0",
            },
            stderr=stderr,
            end_by=signal.SIGTERM if is_watched else signal.SIGKILL,
            is_patient=is_patient,
        )


class _Clock:
    """A time limit, which begins again where it is over and the CPU time used meanwhile has grown."""

    def __init__(self, seconds: float, used: Callable[[], float | None] | None):
        self._seconds, self._until, self._ask = seconds, time.monotonic() + seconds, used
        self._used = None if used is None else used()

    @property
    def left(self) -> float:
        return self._until - time.monotonic()

    def is_over(self) -> bool:
        used = None if self._ask is None else self._ask()
        if used is None or used == self._used:
            return True
        self._used, self._until = used, time.monotonic() + self._seconds
        return False


def _is_ready(file: int, event: int, seconds: float | None) -> bool:
    """Whether a pipe becomes readable or writable, or is closed, in this time."""
    poll = select.poll()
    poll.register(file, event)
    return bool(poll.poll(None if seconds is None else math.ceil(seconds * 1000)))
