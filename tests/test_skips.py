"""The rule that a test may not skip without leave, tried in a pytest of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

SKIPS = """
import pytest
def test_passes(): pass
def test_skips(): pytest.skip({reason!r})
@pytest.mark.xfail(reason="known")
def test_xfails(): assert False
"""
MODULE_SKIPS = """
import pytest
pytest.skip({reason!r}, allow_module_level=True)
"""


def run_pytest(folder: Path, source: str, **env: str) -> subprocess.CompletedProcess[str]:
    for name in ("conftest.py", "allowed_skips.txt"):
        shutil.copy(HERE / name, folder)
    (folder / "test_tiny.py").write_text(source)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = kill: slow\n")
    clean = {k: v for k, v in os.environ.items() if k not in ("CI", "LEMMA_STRICT_SKIPS")}
    clean["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", str(folder)]
    return subprocess.run(command, env=clean | env, cwd=folder, capture_output=True, text=True, timeout=500)


@pytest.mark.parametrize("source", [SKIPS, MODULE_SKIPS], ids=["test", "module"])
def test_strict_mode_fails_on_a_skip_without_leave(tmp_path: Path, source: str) -> None:
    result = run_pytest(tmp_path, source.format(reason="not today"), LEMMA_STRICT_SKIPS="1")
    assert result.returncode == 1, result.stdout
    assert "not today" in result.stdout and "skipped without leave" in result.stdout
    assert "xfails" not in result.stdout


def test_continuous_integration_is_strict(tmp_path: Path) -> None:
    assert run_pytest(tmp_path, SKIPS.format(reason="not today"), CI="true").returncode == 1


def test_listed_skips_and_lenient_runs_pass(tmp_path: Path) -> None:
    listed = run_pytest(tmp_path, SKIPS.format(reason="shared data absent: x"), LEMMA_STRICT_SKIPS="1")
    lenient = run_pytest(tmp_path, SKIPS.format(reason="not today"))
    assert (listed.returncode, lenient.returncode) == (0, 0), listed.stdout + lenient.stdout


def test_kill_tests_run_only_when_asked_for(tmp_path: Path) -> None:
    source = "import pytest\ndef test_a(): pass\n@pytest.mark.kill\ndef test_b(): assert False\n"
    assert run_pytest(tmp_path, source).returncode == 0
