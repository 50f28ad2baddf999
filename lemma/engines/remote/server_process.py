"""A generation server that Lemma starts on this machine."""

from __future__ import annotations

import os
import queue
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

import lemma
from lemma.engines.protocol import EngineError
from lemma.engines.remote.process_group import kill_group
from lemma.engines.remote.server_client import ServerClient, ServerReply
from lemma.engines.remote.server_guard import KEY_VARIABLE, PARENT_VARIABLE

POLL_SECONDS = 0.1
# Variables of torch.distributed, which a server must not inherit.
OF_RANKS = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}
# What an error says that is not the cause itself.
POINTERS = ("see root cause above", "see stack trace", "initialization failed", "engine core proc")


class ServerProcess(ServerClient):
    """One server process with its client. It ends with the process: a restart makes another one, which may have the
    same port and key, so that other ranks still find it. Call `wait_until_ready` before use.

    `command` gives the command line and the environment for a port."""

    def __init__(
        self,
        command: Callable[[int], tuple[list[str], Mapping[str, str]]],
        log: Path,
        seconds: float,
        noun: str,
        replies: queue.Queue[ServerReply] | None = None,
        key: str | None = None,
        port: int | None = None,
    ):
        key, self.port = key or secrets.token_hex(16), port or free_port()
        super().__init__(f"http://127.0.0.1:{self.port}", key, replies)
        self._log, self._end, self._noun = log, time.monotonic() + seconds, noun
        self._seconds = seconds
        line, environment = command(self.port)
        self._process = subprocess.Popen(
            line,
            stdin=subprocess.DEVNULL,
            stdout=log.open("wb"),
            stderr=subprocess.STDOUT,
            env={**environment, KEY_VARIABLE: key, PARENT_VARIABLE: str(os.getpid())},
            start_new_session=True,
        )
        self._kill = weakref.finalize(self, _kill, self._process)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def place(self) -> str:
        return f"the {self._noun}"

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def last_words(self) -> str:
        """The line of the log that best explains why it ended."""
        return cause_in(self._log)

    def close(self) -> None:
        """Kill the server and everything it started."""
        super().close()
        self._kill()

    def is_ready(self) -> bool:
        """Whether it is up; an error if it never will be."""
        if self.is_well():
            return True
        if not self.is_alive():
            # The log lies among files that go away with the engine.
            log = shutil.copy(self._log, Path(tempfile.gettempdir()) / f"server-{self.pid}.log")
            raise EngineError(f"the {self._noun} does not start: {self.last_words()}", fix=f"its log is {log}")
        if time.monotonic() > self._end:
            raise EngineError(
                f"the {self._noun} was not ready after {self._seconds:g} seconds", fix="raise start_seconds"
            )
        return False

    def wait_until_ready(self) -> None:
        try:
            while not self.is_ready():
                time.sleep(POLL_SECONDS)
        except BaseException:
            self.close()
            raise


def own_environment() -> dict[str, str]:
    """That of this process, without what makes it a rank; the same Lemma is found."""
    root = str(Path(lemma.__file__).resolve().parents[1])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    own = {name: value for name, value in os.environ.items() if name not in OF_RANKS}
    return own | {"PYTHONPATH": os.pathsep.join(paths)}


def cause_in(log: Path) -> str:
    """The line that says why a server ended. The process that fails says it, and those that wait for it follow with
    errors that only point there."""
    text = log.read_text(errors="replace") if log.exists() else ""
    lines = [line for line in map(str.strip, text.splitlines()) if line]
    errors = [line for line in lines if "Error" in line or "error:" in line]
    causes = [line for line in errors if not any(words in line.lower() for words in POINTERS)]
    return (causes or errors or lines or ["nothing"])[-1][-300:]


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all that it started: it has no state worth saving."""
    kill_group(process.pid)
    process.wait(timeout=30.0)
