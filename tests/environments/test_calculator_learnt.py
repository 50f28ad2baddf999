"""A tiny model learns to call the calculator, and the same training without it stays where it was."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_the_calculator_is_learnt(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.calculator"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-2000:]
    found = re.findall(r"right ([\d.]+) -> ([\d.]+), calls per episode ([\d.]+) -> ([\d.]+)", done.stdout)
    (_, right, few, many), (_, alone, _, _) = [[float(value) for value in row] for row in found]
    assert right >= 0.8 and alone <= 0.3
    assert few < many and 2.7 <= many <= 3.3
