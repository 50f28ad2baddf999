"""The Triton kernels of decoding against plain torch, run by Triton's interpreter in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("interpreted_native_kernels.py")


def test_kernels_equal_plain_code() -> None:
    pytest.importorskip("triton", reason="triton is for Linux only")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    names = "attention sampling sampled_often cuts nearly_certain hostile tried moved engine"
    assert done.stdout.split() == names.split()
