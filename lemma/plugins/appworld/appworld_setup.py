"""Installs AppWorld into its own virtual environment: it needs older versions of packages that Lemma uses."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from lemma.core.errors import UserError

VERSION = "0.1.3.post1"
STAMP = ".lemma-appworld"
WORDS = 600


def is_set_up(venv: Path) -> bool:
    stamp = venv / STAMP
    return stamp.is_file() and stamp.read_text(encoding="utf-8").strip() == VERSION


def set_up(venv: Path, python: str = sys.executable, say: Callable[[str], None] = print) -> None:
    """Make the virtual environment and install AppWorld in it, unless it is there; one sentence where that fails."""
    if is_set_up(venv):
        say(f"AppWorld {VERSION} is installed in {venv}.")
        return
    say(f"Installing AppWorld {VERSION} into {venv}: 170 MB, half a minute.")
    shutil.rmtree(venv, ignore_errors=True)
    # Our own pip serves, where there is one. Python compiles what it imports; to compile everything takes too long.
    own, is_there = str(venv / "bin" / "python"), find_spec("pip") is not None
    make = [python, "-m", "venv", *(["--without-pip"] if is_there else []), str(venv)]
    _run(make, "make a virtual environment", "name another Python with --python")
    pip = [sys.executable, "-m", "pip", "--python", own] if is_there else [own, "-m", "pip"]
    install = [*pip, "install", "-q", "--no-compile", "--disable-pip-version-check", f"appworld=={VERSION}"]
    _run(install, f"install appworld {VERSION}", "see that pip reaches a package registry")
    # The apps come packed inside the package; its own tests, which nothing here needs, would go to the user's home.
    cache = venv / "cache"
    unpack = [str(venv / "bin" / "appworld"), "install"]
    _run(unpack, "unpack AppWorld's apps", "remove the folder and try again", APPWORLD_CACHE=str(cache))
    shutil.rmtree(cache, ignore_errors=True)
    (venv / STAMP).write_text(f"{VERSION}\n", encoding="utf-8")


def data_advice(root: Path, venv: Path) -> list[str]:
    """How to get the official tasks, which do not come with the package."""
    return [
        "The tasks do not come with the package. Where their store can be reached:",
        f"  {venv / 'bin' / 'appworld'} download data --root {root}",
        f"Elsewhere, copy the folder `data` of a machine that has it to {root / 'data'}.",
        "AppWorld asks that its tasks are not published in plain text.",
    ]


def _run(command: Sequence[str], what: str, fix: str, **environment: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)
    except OSError as error:
        raise UserError(f"cannot {what}: {error.strerror}", fix=fix) from None
    if done.returncode:
        raise UserError(f"cannot {what}: {(done.stderr or done.stdout).strip()[-WORDS:]}", fix=fix)
