"""What a run does not need is not imported, whatever is installed beside Lemma."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
import lemma.runs.run
from transformers import Qwen3ForCausalLM
assert "sklearn" not in sys.modules, "imported"
import sklearn.metrics
print(sklearn.metrics.roc_curve)
"""


def test_scikit_learn_is_not_imported_and_can_be(tmp_path: Path) -> None:
    (tmp_path / "sklearn").mkdir()
    (tmp_path / "sklearn" / "__init__.py").touch()
    (tmp_path / "sklearn" / "metrics.py").write_text("roc_curve = 'there'\n")
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "there\n"
