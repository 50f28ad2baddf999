"""MLflow and Trackio from the package registry, in a virtual environment beside the tests' own, made once."""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

VENV = Path(sys.prefix) / "loggers"
ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "requirements" / "loggers.txt"
INSTALL_SECONDS = 60


def python_with_loggers() -> Path:
    """A Python that has them, Lemma and what Lemma needs; the test that asks for it skips where they cannot be had."""
    python = VENV / "bin" / "python"
    done = VENV / f"made-{hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:12]}"
    with open(VENV.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            _make(python)
            done.touch()
    return python


def _make(python: Path) -> None:
    _call(sys.executable, "-m", "venv", "--clear", "--without-pip", str(VENV))
    folder = VENV / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    (folder / "beside.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n")
    pip = (sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-compile")
    _call(*pip, "-r", str(REQUIREMENTS))


def _call(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS)
    except subprocess.TimeoutExpired:
        pytest.skip(f"MLflow and Trackio took longer than {INSTALL_SECONDS} s to install")
    if done.returncode:
        pytest.skip(f"MLflow and Trackio could not be installed: {done.stderr[-300:]}")
