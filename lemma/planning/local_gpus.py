"""The memory of this machine's GPUs, as their driver tells it: torch, which would tell too, takes seconds to import."""

from __future__ import annotations

import os
from pathlib import Path

# What the drivers of NVIDIA and AMD, and Windows for its Linux, leave on a machine with a GPU.
DRIVERS = ("/proc/driver/nvidia/version", "/dev/kfd", "/dev/dxg")
SECONDS = 10.0


def has_driver() -> bool:
    """Whether there seems to be a GPU."""
    return any(Path(place).exists() for place in DRIVERS)


def gpu_memories() -> list[float]:
    """Bytes of each GPU that a run may use here, largest first; empty where there is none, or where NVIDIA's tool does
    not tell. Where GPUs of several sizes are chosen by number, the largest are taken: CUDA counts from the fastest,
    the tool along the bus."""
    if not has_driver():
        return []
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [] if shown is None else shown.split(",")
    if not all(name.isdecimal() for name in names) or os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return _told_by_tool(shown)
    return _told_by_tool(None)[: len(names) or None]


def _told_by_tool(shown: str | None) -> list[float]:
    """All of them, or those that are `shown`."""
    import subprocess

    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    command += [] if shown is None else [f"--id={shown}"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True).stdout
        return sorted((float(line) * 2**20 for line in told.split()), reverse=True)
    except (OSError, subprocess.SubprocessError, ValueError):
        return []
