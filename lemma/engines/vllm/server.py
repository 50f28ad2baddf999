"""A vLLM server process that Lemma starts on this machine."""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lemma.engines.protocol import EngineError
from lemma.engines.vllm.serve import KEY_VARIABLE, PARENT_VARIABLE
from lemma.engines.vllm.server_client import ServerClient, ServerReply
from lemma.engines.vllm.settings import as_options, server_environment

POLL_SECONDS = 0.1


class Server(ServerClient):
    """One server process with its client. It ends with the process: a restart makes another `Server`, which may have
    the same port and key, so that other ranks still find it. Call `wait_until_ready` before use."""

    def __init__(
        self,
        arguments: Mapping[str, Any],
        environment: Mapping[str, str],
        log: Path,
        seconds: float,
        replies: queue.Queue[ServerReply] | None = None,
        key: str | None = None,
        port: int | None = None,
    ):
        key, self.port = key or secrets.token_hex(16), port or _free_port()
        super().__init__(f"http://127.0.0.1:{self.port}", key, replies)
        self._log, self._end = log, time.monotonic() + seconds
        self._seconds = seconds
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lemma.engines.vllm.serve", *as_options(arguments, "127.0.0.1", self.port)],
            stdin=subprocess.DEVNULL,
            stdout=log.open("wb"),
            stderr=subprocess.STDOUT,
            env={
                **server_environment(environment, log.parent),
                KEY_VARIABLE: key,
                PARENT_VARIABLE: str(os.getpid()),
            },
            start_new_session=True,
        )
        self._kill = weakref.finalize(self, _kill_group, self._process)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def place(self) -> str:
        return "the vLLM server"

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def last_words(self) -> str:
        """The line of the log that best explains why it ended."""
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        telling = [line for line in lines if "Error" in line or "error:" in line]
        return (telling or lines or ["nothing"])[-1].strip()[-300:]

    def close(self) -> None:
        """Kill the server and everything it started."""
        super().close()
        self._kill()

    def is_ready(self) -> bool:
        """Whether it is up; an error if it never will be."""
        if self.is_well():
            return True
        if not self.is_alive():
            raise EngineError(f"the vLLM server does not start: {self.last_words()}")
        if time.monotonic() > self._end:
            raise EngineError(
                f"the vLLM server was not ready after {self._seconds:g} seconds", fix="raise start_seconds"
            )
        return False

    def wait_until_ready(self) -> None:
        try:
            while not self.is_ready():
                time.sleep(POLL_SECONDS)
        except BaseException:
            self.close()
            raise


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all that it started: it has no state worth saving."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=30.0)
