"""Lemma's side of the runner: starts it once for a trainer and its workers; each connection is one world."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import selectors
import socket
import subprocess
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from lemma.core.errors import UserError, warn
from lemma.environments.appworld.runner import frames
from lemma.environments.environment import WorldGone

SERVER = Path(__file__).parent / "runner" / "fork_server.py"
START_SECONDS = 180.0
OPEN_SECONDS = 60.0
WORDS = 600
# Workers find the runner of their trainer by this name and the digest of its settings.
VARIABLE = "LEMMA_APPWORLD_"


@dataclass(frozen=True)
class RunnerSettings:
    """Which AppWorld, the path of its data, and the limits of a world."""

    python: str
    root: str
    memory_mb: int
    cpu_seconds: int
    sandbox: str

    @property
    def variable(self) -> str:
        return VARIABLE + hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:12]


class AppWorldRunner:
    """A fork server. It ends with this process, however that ends: it holds the other end of a pipe."""

    def __init__(self, settings: RunnerSettings):
        self.address = f"lemma-appworld-{os.getpid()}-{secrets.token_hex(6)}"
        self._complaints: IO[bytes] = tempfile.TemporaryFile()
        given = {
            "address": self.address,
            "root": settings.root,
            "limits": {"memory_mb": settings.memory_mb, "cpu_seconds": settings.cpu_seconds},
            "sandbox": settings.sandbox,
        }
        self._process = subprocess.Popen(
            [settings.python, str(SERVER), json.dumps(given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            start_new_session=True,
            cwd=settings.root,
            env=_clean_environment(),
        )
        self._is_ready = False
        self._lock = threading.Lock()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait(self) -> None:
        """Until it serves; one sentence where it does not."""
        with self._lock:
            if self._is_ready:
                return
            line = self._first_line()
            if not line:
                self.stop()
                raise UserError(
                    f"AppWorld does not start: {self._last_words()}", fix="`lemma env setup appworld` repairs it"
                )
            _tell(json.loads(line), self)
            self._is_ready = True

    def _first_line(self) -> bytes:
        assert self._process.stdout is not None
        line, until = b"", time.monotonic() + START_SECONDS
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n") and selector.select(max(0.0, until - time.monotonic())):
                part = os.read(self._process.stdout.fileno(), 4096)
                if not part:
                    return b""
                line += part
        return line if line.endswith(b"\n") else b""

    def _last_words(self) -> str:
        self._complaints.seek(0)
        said = self._complaints.read().decode("utf-8", "replace").strip()
        return said[-WORDS:] if said else f"it said nothing within {START_SECONDS:.0f} seconds"

    def stop(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


_runners: dict[RunnerSettings, AppWorldRunner] = {}
_starting = threading.Lock()


def begin(settings: RunnerSettings) -> None:
    """Start the runner, unless it is there; nothing is waited for. Processes that are started later find it."""
    with _starting:
        runner = _runners.get(settings)
        if runner is None or not runner.is_alive:
            runner = _runners[settings] = AppWorldRunner(settings)
            os.environ[settings.variable] = f"{runner.address} {runner.pid}"


def stop_all() -> None:
    """End every runner of this process, with all its worlds."""
    with _starting:
        for settings, runner in _runners.items():
            runner.stop()
            os.environ.pop(settings.variable, None)
        _runners.clear()


def connect(settings: RunnerSettings) -> socket.socket:
    """A connection to the runner: the trainer's, or one of this process."""
    address, _, pid = os.environ.get(settings.variable, "").partition(" ")
    if settings not in _runners and pid:
        with contextlib.suppress(OSError):
            return _connected(address, int(pid), START_SECONDS)
    begin(settings)
    runner = _runners[settings]
    runner.wait()
    try:
        return _connected(runner.address, runner.pid, OPEN_SECONDS)
    except OSError as error:
        raise WorldGone(f"AppWorld's runner does not answer: {error}") from error


def _connected(address: str, pid: int, patience: float) -> socket.socket:
    """Try until the runner has imported AppWorld, for as long as its process is there at all."""
    until = time.monotonic() + patience
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect("\0" + address)
            return connection
        except OSError:
            connection.close()
            if time.monotonic() > until or not _is_alive(pid):
                raise
            time.sleep(0.1)


class RemoteWorld:
    """One connection: the first message says what is wanted, each later one is a call."""

    def __init__(self, settings: RunnerSettings, wanted: dict[str, Any], seconds: float = OPEN_SECONDS):
        self._connection = connect(settings)
        self._calls = 0
        self.first = self.call(wanted, seconds)

    def call(self, message: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The answer; raises `WorldGone` if none arrives within `seconds`, and the world has ended."""
        self._calls += 1
        try:
            self._connection.settimeout(seconds)
            frames.send(self._connection, {**message, "number": self._calls})
            answer = frames.receive(self._connection)
        except TimeoutError:
            self.close()
            raise WorldGone(f"`{message['call']}` took longer than {seconds:g} seconds") from None
        except (OSError, EOFError):
            self.close()
            raise WorldGone(f"the world ended during `{message['call']}`") from None
        except ValueError:
            self.close()
            raise WorldGone(f"the world answered `{message['call']}` with what is no message") from None
        if not isinstance(answer, dict) or "error" in answer:
            self.close()
            raise WorldGone(f"`{message['call']}` failed: {str(answer)[:WORDS]}")
        if answer.get("number") != self._calls:
            # Agent code can write to the socket of its own world.
            self.close()
            raise WorldGone(f"the world answered `{message['call']}` out of turn")
        return answer

    def close(self) -> None:
        """End the world, whatever it is doing."""
        self._connection.close()


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _clean_environment() -> dict[str, str]:
    """No token and no path of this process: agent code can read it. AppWorld reads no `.env` either."""
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "HOME": "/nonexistent",
        "APPWORLD_CACHE": "/nonexistent",
        "PYTHONHASHSEED": "0",
        "PYTHON_DOTENV_DISABLED": "1",
    }


def _tell(ready: dict[str, str], runner: AppWorldRunner) -> None:
    """Say how worlds are confined where it is not the usual way; refuse where they would not be at all."""
    if not ready["sandbox"]:
        runner.stop()
        raise UserError(
            f"this machine confines no process, and agents could read all its files ({ready['missing']})",
            fix="allow user namespaces, or write `sandbox: none` for the environment where nothing there is private",
        )
    if ready["missing"]:
        warn(
            "user namespaces are not allowed here: worlds of AppWorld are kept from files by Landlock and from the "
            f"network by a filter of system calls ({ready['missing']})"
        )
