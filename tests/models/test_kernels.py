"""The Triton kernels against plain torch, run on the CPU by Triton's interpreter, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("interpreted_kernels.py")


def test_kernels_equal_plain_code() -> None:
    pytest.importorskip("triton", reason="triton is for Linux only")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    kinds = ["norm", "add_norm", "gate", "joint_gate", "split", "softmax", "kept_logits", "readers", "adapters"]
    assert done.stdout.splitlines() == [*kinds, "blocks"]
