"""AppWorld for tests: a virtual environment inside that of the tests, and a root with tasks of our own, made once."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lemma.core.errors import UserError
from lemma.environments import AppWorldOptions
from lemma.plugins.appworld.appworld_setup import set_up

BUILDER = Path(__file__).with_name("appworld_root.py")


@dataclass(frozen=True)
class Place:
    venv: Path
    root: Path

    def given(self, **more: Any) -> dict[str, Any]:
        """The options that all tests share, so that they share a runner."""
        small = {"code_seconds": 3, "cpu_seconds": 5, "memory_mb": 256, "turns": 8}
        return {"name": "appworld", "root": str(self.root), "venv": str(self.venv), **small, **more}

    def options(self, **more: Any) -> AppWorldOptions:
        return AppWorldOptions.model_validate(self.given(**more))


def appworld_place() -> Place:
    """Where it is; the test that asks for it skips where the package registry does not give it."""
    venv = Path(sys.prefix) / "appworld"
    with _alone(Path(sys.prefix) / "appworld.lock"):
        try:
            set_up(venv, say=lambda line: None)
        except UserError as error:
            pytest.skip(f"needs AppWorld from the package registry: {error}")
        name = hashlib.sha256(BUILDER.read_bytes()).hexdigest()[:12]
        root = venv / f"lemma-root-{name}"
        if not root.exists():
            made = root.with_suffix(".part")
            shutil.rmtree(made, ignore_errors=True)
            command = [str(venv / "bin" / "python"), str(BUILDER), str(made)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr[-2000:]
            made.rename(root)
    return Place(venv, root)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
