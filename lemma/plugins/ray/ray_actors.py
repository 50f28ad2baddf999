"""An actor of Ray that holds one process: a rank, or a vLLM server. It starts on its node what would be started there
by hand, and says how it goes."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lemma.engines.remote.server_guard import PARENT_VARIABLE
from lemma.engines.remote.server_process import cause_in, free_port, own_environment


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
        return free_port("")

    def start(self, module: str, arguments: Sequence[str], variables: dict[str, str], folder: str) -> int:
        """Run a module of Python in this folder; its process id."""
        own = own_environment() | {"TMPDIR": str(self._log.parent), PARENT_VARIABLE: str(os.getpid())}
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lemma.engines.remote.run_module", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=own | variables,
                cwd=folder if Path(folder).is_dir() else None,
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
        return cause_in(self._log)

    def interrupt(self, number: int) -> None:
        """Ask it to save and end; a second Ctrl-C, to end at once."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

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
