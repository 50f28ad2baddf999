"""Lemma's side of the runner: starts it once for a trainer and its workers; each connection is one world."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import socket
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lemma.children import Child, ChildGone
from lemma.children.child_frames import pack, receive
from lemma.core.errors import UserError, warn
from lemma.environments.environment import WorldGone

SERVER = Path(__file__).parent / "runner" / "fork_server.py"
START_SECONDS = 180.0
OPEN_SECONDS = 60.0
WORDS = 600
# Saved changes of a task are far smaller.
LONGEST = 64 * 2**20
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


class AppWorldRunner(Child):
    """A fork server. It ends with this process, however that ends, since that closes its standard input."""

    def __init__(self, settings: RunnerSettings):
        self.address = f"lemma-appworld-{os.getpid()}-{secrets.token_hex(6)}"
        given = {
            "address": self.address,
            "root": settings.root,
            "limits": {"memory_mb": settings.memory_mb, "cpu_seconds": settings.cpu_seconds},
            "sandbox": settings.sandbox,
        }
        super().__init__([settings.python, str(SERVER), json.dumps(given)], cwd=settings.root, env=_clean_environment())
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Until it serves; one sentence where it does not."""
        with self._lock:
            if not self.is_ready:
                try:
                    _tell(self.wait_until_ready(START_SECONDS), self)
                except ChildGone as error:
                    raise UserError(
                        f"AppWorld does not start: {error}", fix="`lemma env setup appworld` repairs it"
                    ) from error


_runners: dict[RunnerSettings, AppWorldRunner] = {}
_starting = threading.Lock()


def begin(settings: RunnerSettings) -> None:
    """Start the runner, unless it is there; nothing is waited for. Processes that are started later find it."""
    with _starting:
        runner = _runners.get(settings)
        if runner is None or not runner.is_alive:
            runner = _runners[settings] = AppWorldRunner(settings)
            os.environ[settings.variable] = f"{runner.address} {runner.process.pid}"


def stop_all() -> None:
    """End every runner of this process, with all its worlds."""
    with _starting:
        for settings, runner in _runners.items():
            runner.end()
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
        return _connected(runner.address, runner.process.pid, OPEN_SECONDS)
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
            self._connection.sendall(pack({**message, "number": self._calls}))
            answer = receive(self._connection.recv, LONGEST)
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
        runner.end()
        raise UserError(
            f"this machine confines no process, and agents could read all its files ({ready['missing']})",
            fix="allow user namespaces, or write `sandbox: none` for the environment where nothing there is private",
        )
    if ready["missing"]:
        warn(
            "user namespaces are not allowed here: worlds of AppWorld are kept from files by Landlock and from the "
            f"network by a filter of system calls ({ready['missing']})"
        )
