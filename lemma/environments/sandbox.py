"""Runs programs written by a model in isolation: one process per sandbox, started with its first program.

`confined/python_child.py` runs inside; it documents and reports the isolation.
"""

from __future__ import annotations

import json
import math
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from lemma.children import Child, ChildGone, ChildSilent
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
        self._child: Child | None = None

    def run(self, code: str) -> str:
        """The program's output, or a sentence that says why it was stopped."""
        child, until = self._started(), time.monotonic() + self.limits.seconds
        try:
            child.tell({"code": code}, self.limits.seconds)
            answer = child.receive(until - time.monotonic())
        except ChildSilent:  # code left running by a program may keep it even from reading
            self.close()
            return f"The program was stopped after {self.limits.seconds:g} s. {GONE}"
        except ChildGone:
            answer = None
        if isinstance(answer, dict) and isinstance(answer.get("output"), str):
            return str(answer["output"])
        self.close()
        return f"The program ended its interpreter, or used up what it may. {GONE}"

    def close(self) -> None:
        """End the process. The next program starts a fresh one."""
        if self._child is not None:
            self._child.end()  # its supervisor kills the program and removes its folder
            self._child = None

    def check(self) -> None:
        """Refuse a machine that cannot isolate programs from files, network and other processes."""
        try:
            self._started()
        finally:
            self.close()

    def _started(self) -> Child:
        if self._child is not None:
            return self._child
        self._child = Child(
            [sys.executable, "-s", "-P", "-S", "-B", str(CHILD), json.dumps(_settings(self.limits, self._seed))],
            cwd="/",
            # A fixed hash seed, so that the order of sets, and with it the output, is reproducible.
            env={"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            end_seconds=END_SECONDS,
            # JSON needs at most twelve bytes per character.
            longest=12 * self.limits.output + 65536,
        )
        try:
            ready = self._child.wait_until_ready(START_SECONDS)
            confined, missing = ready["confined"], ready["missing"]
        except (ChildGone, KeyError, TypeError) as error:
            self.close()
            raise WorldGone("the sandbox did not start") from error
        Sandbox.confine = confined or "auto"
        if not confined and self.limits.is_isolated:
            self.close()
            raise UserError(
                f"this machine cannot keep programs of the model from its files, network and processes ({missing})",
                fix="train where Linux has Landlock and seccomp, or write `isolated: false` where nothing is at stake",
            )
        return self._child


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
