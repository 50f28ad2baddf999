"""Runs programs written by a model in isolation: one process per sandbox, started with its first program.

`confined/python_child.py` runs inside; it documents and reports the isolation.
"""

from __future__ import annotations

import json
import math
import os
import select
import subprocess
import sys
import sysconfig
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from lemma.core.errors import UserError
from lemma.environments.environment import WorldGone

CHILD = Path(__file__).parent / "confined" / "python_child.py"
# Python and its libraries: the only files that a program can read.
LIBRARIES = ("/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib", "/lib64")
# CPU time limit of a process, as a number of programs that run to their time limit.
PROGRAMS = 32
START_SECONDS, END_SECONDS = 30.0, 2.0
FILES_MB = 32
GONE = "Its variables are gone."


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Limits of a program. `output` is in characters; with `packages` it may import what is installed with Lemma."""

    seconds: float = 5.0
    memory_mb: int = 512
    output: int = 4000
    packages: bool = True
    is_isolated: bool = True


class Sandbox:
    """Runs programs one at a time; each sees the variables of earlier ones."""

    confine: ClassVar[str] = "auto"
    """How: found out by the first that starts on this machine."""

    def __init__(self, limits: SandboxLimits, seed: int = 0):
        self.limits, self._seed = limits, seed
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = bytearray()

    def run(self, code: str) -> str:
        """The program's output, or a sentence that says why it was stopped."""
        self._start()
        assert self._process is not None and self._process.stdin is not None
        deadline = time.monotonic() + self.limits.seconds
        try:
            is_sent = self._send(json.dumps({"code": code}).encode() + b"\n", deadline)
            line = self._line(deadline) if is_sent else None
        except BrokenPipeError:
            line = b""
        if line is None:
            self.close()
            return f"The program was stopped after {self.limits.seconds:g} s. {GONE}"
        try:
            output = json.loads(line)["output"]
            if isinstance(output, str):
                return output
        except (ValueError, KeyError, TypeError):
            pass
        self.close()
        return f"The program ended its interpreter, or used up what it may. {GONE}"

    def close(self) -> None:
        """Kill the process. The next program starts a fresh one."""
        process, self._process = self._process, None
        self._buffer.clear()
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()
        try:
            process.wait(END_SECONDS)  # its supervisor kills the program and removes its folder
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def check(self) -> None:
        """Refuse a machine that cannot isolate programs from files, network and other processes."""
        try:
            self._start()
        finally:
            self.close()

    def _start(self) -> None:
        if self._process is not None:
            return
        self._process = subprocess.Popen(
            [sys.executable, "-s", "-P", "-S", "-B", str(CHILD), json.dumps(_settings(self.limits, self._seed))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            # A fixed hash seed, so that the order of sets, and with it the output, is reproducible.
            env={"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,
        )
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        line = self._line(time.monotonic() + START_SECONDS)
        try:
            ready = json.loads(line or b"")
            confined, missing = ready["confined"], ready["missing"]
        except (ValueError, KeyError, TypeError) as error:
            self.close()
            raise WorldGone("the sandbox did not start") from error
        Sandbox.confine = confined or "auto"
        if not confined and self.limits.is_isolated:
            self.close()
            raise UserError(
                f"this machine cannot keep programs of the model from its files, network and processes ({missing})",
                fix="train where Linux has Landlock and seccomp, or write `isolated: false` where nothing is at stake",
            )

    def _send(self, data: bytes, deadline: float) -> bool:
        """Whether the process read everything in time: code left running by a program may keep it from reading."""
        assert self._process is not None and self._process.stdin is not None
        file, rest = self._process.stdin.fileno(), memoryview(data)
        while rest:
            left = deadline - time.monotonic()
            if left <= 0 or not _is_ready(file, select.POLLOUT, left):
                return False
            with suppress(BlockingIOError):
                rest = rest[os.write(file, rest) :]
        return True

    def _line(self, deadline: float) -> bytes | None:
        """The next line; None if none arrives in time, empty if the process has ended or writes too much."""
        assert self._process is not None and self._process.stdout is not None
        file = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not _is_ready(file, select.POLLIN, left):
                return None
            data = os.read(file, 65536)
            self._buffer += data
            # JSON needs at most twelve bytes per character.
            if not data or len(self._buffer) > 12 * self.limits.output + 65536:
                return b""
        line, _, rest = bytes(self._buffer).partition(b"\n")
        self._buffer = bytearray(rest)
        return line


def _is_ready(file: int, event: int, seconds: float) -> bool:
    """Whether a file becomes readable or writable, or is closed, within `seconds`."""
    poll = select.poll()
    poll.register(file, event)
    return bool(poll.poll(math.ceil(seconds * 1000)))


def _settings(limits: SandboxLimits, seed: int) -> dict[str, object]:
    packages = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}) if limits.packages else []
    own = [str(Path(sys.base_prefix) / "lib"), str(Path(sys.base_exec_prefix) / "lib"), sys.prefix + "/lib64"]
    return {
        "seed": seed,
        "confine": Sandbox.confine,
        "output": limits.output,
        "memory_mb": limits.memory_mb,
        "files_mb": FILES_MB,
        "processor_seconds": math.ceil(limits.seconds) * PROGRAMS,
        "readable": [*LIBRARIES, *own, *packages],
        "packages": packages,
    }
