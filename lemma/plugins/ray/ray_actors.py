"""An actor of Ray that holds one process: a rank, or a vLLM server. It starts on its node what would be started there
by hand, and says how it goes."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import lemma
from lemma.engines.remote.server_guard import PARENT_VARIABLE

LAST_BYTES = 4000


@dataclass(frozen=True)
class Home:
    """Where an actor is: its node, the address that others reach it by, and the GPUs that Ray gave it."""

    node: str
    address: str
    gpus: tuple[str, ...]


class ProcessActor:
    """One process at a time, in a group of its own, with its output in a file."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._log = Path(tempfile.mkdtemp(prefix="lemma-ray-")) / "output.log"

    def home(self) -> Home:
        import ray

        context = ray.get_runtime_context()
        gpus = tuple(str(gpu) for gpu in ray.get_gpu_ids())
        return Home(context.get_node_id(), ray.util.get_node_ip_address(), gpus)

    def free_port(self) -> int:
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    def start(self, module: str, arguments: Sequence[str], variables: Mapping[str, str], folder: str) -> int:
        """Run a module of Python in this folder; its process id."""
        root = str(Path(lemma.__file__).resolve().parents[1])
        paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        place = Path(folder)
        own = {"PYTHONPATH": os.pathsep.join(paths), "TMPDIR": str(self._log.parent), PARENT_VARIABLE: str(os.getpid())}
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lemma.plugins.ray.ray_rank", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **own, **variables},
                cwd=place if place.is_dir() else None,
                start_new_session=True,
            )
        return self._process.pid

    def look(self, offset: int) -> tuple[int | None, str, int]:
        """The exit status, what was written since, and how much was written in all."""
        status = None if self._process is None else self._process.poll()
        if not self._log.exists():
            return status, "", offset
        with self._log.open("rb") as stream:
            stream.seek(offset)
            new = stream.read()
        return status, new.decode(errors="replace"), offset + len(new)

    def last_words(self) -> str:
        text = self._log.read_bytes()[-LAST_BYTES:].decode(errors="replace") if self._log.exists() else ""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        telling = [line for line in lines if "Error" in line or "error:" in line]
        return (telling or lines or ["it said nothing"])[-1][-300:]

    def interrupt(self) -> None:
        """Ask it to save and end."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it and all that it started, at once."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(timeout=30.0)

    def close(self) -> None:
        """End it, and leave nothing on the node's disk."""
        self.kill()
        shutil.rmtree(self._log.parent, ignore_errors=True)
