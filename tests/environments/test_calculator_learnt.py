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
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_calculator_is_learnt(seed: int, tmp_path: Path) -> None:
    """Seen: 0.72 to 0.91, 0.57 to 0.78 and 0.65 to 0.91 right, in the end with 3.0 calls each; without it 0.11."""
    command = [sys.executable, "-m", "benchmarks.calculator", "--seed", str(seed)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-2000:]
    found = re.findall(r"right ([\d.]+) -> ([\d.]+), calls per episode ([\d.]+) -> ([\d.]+)", done.stdout)
    (first, right, few, many), (_, alone, _, _) = [[float(value) for value in row] for row in found]
    assert right >= max(0.65, first + 0.1), "five steps of many problems each"
    assert alone <= 0.3
    assert few < many and 2.7 <= many <= 3.3
