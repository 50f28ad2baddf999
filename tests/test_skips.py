"""What the root conftest.py does to a run, tried in a pytest of its own, with and without workers."""

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


WORKERS = ["-p", "xdist.plugin", "-n2", "--dist=loadfile", "--no-loadscope-reorder"]


def run_pytest(folder: Path, source: str, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    shutil.copy(HERE / "conftest.py", folder)
    (folder / "allowed_skips.txt").write_text("# why\n*test_tiny.py* : no such part*\n")
    (folder / "test_tiny.py").write_text(source)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n kill: few\n seeds: few\n slow: long\n crowded: x\n")
    clean = {k: v for k, v in os.environ.items() if k not in ("CI", "LEMMA_STRICT_SKIPS")}
    clean["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *options, str(folder)]
    return subprocess.run(command, env=clean | env, cwd=folder, capture_output=True, text=True, timeout=500)


@pytest.mark.parametrize("options", [[], WORKERS], ids=["alone", "workers"])
@pytest.mark.parametrize("source", [SKIPS, MODULE_SKIPS], ids=["test", "module"])
def test_strict_mode_fails_on_a_skip_without_leave(tmp_path: Path, source: str, options: list[str]) -> None:
    result = run_pytest(tmp_path, source.format(reason="not today"), *options, LEMMA_STRICT_SKIPS="1")
    assert result.returncode == 1, result.stdout
    assert "not today" in result.stdout and "skipped without leave" in result.stdout
    assert "xfails" not in result.stdout


def test_continuous_integration_is_strict(tmp_path: Path) -> None:
    assert run_pytest(tmp_path, SKIPS.format(reason="not today"), CI="true").returncode == 1


def test_listed_skips_and_lenient_runs_pass(tmp_path: Path) -> None:
    listed = SKIPS.format(reason="no such part: x")
    alone = run_pytest(tmp_path, listed, LEMMA_STRICT_SKIPS="1")
    among_workers = run_pytest(tmp_path, listed, *WORKERS, LEMMA_STRICT_SKIPS="1")
    lenient = run_pytest(tmp_path, SKIPS.format(reason="not today"))
    for result in (alone, among_workers, lenient):
        assert result.returncode == 0 and "1 passed, 1 skipped, 1 xfailed" in result.stdout, result.stdout


MARKED = """
import pytest
def test_a(): pass
@pytest.mark.kill
def test_b(): assert False
@pytest.mark.slow
def test_c(): pass
@pytest.mark.kill
@pytest.mark.slow
def test_d(): assert False
"""


@pytest.mark.parametrize(
    ("options", "outcome"),
    [([], "2 passed, 2 deselected"), (["-m", "slow"], "1 passed, 3 deselected"), (["-m", "kill"], "2 failed, 2 desel")],
    ids=["none", "slow", "kill"],
)
def test_kill_tests_run_only_when_named(tmp_path: Path, options: list[str], outcome: str) -> None:
    assert outcome in run_pytest(tmp_path, MARKED, *options).stdout


def test_crowded_files_come_first_then_long_ones_and_slow_tests_are_marked(tmp_path: Path) -> None:
    tests = {"a": ["quick"], "b": ["x", "y"], "c": ["z"], "d": ["two"]}
    for name, functions in tests.items():
        cases = "@__import__('pytest').mark.parametrize('n', range(2))\n" if name == "d" else ""
        lines = (f"{cases}def test_{function}({cases and 'n'}): pass\n" for function in functions)
        (tmp_path / f"test_{name}.py").write_text("".join(lines))
    crowded = "pytestmark = [__import__('pytest').mark.crowded, __import__('pytest').mark.slow]\n"
    (tmp_path / "test_e.py").write_text(crowded + "def test_quick(): pass\n")
    seconds = {"b.py::test_x": 10.0, "b.py::test_y": 11.0, "c.py::test_z": 20.0, "d.py::test_two": 12.0}
    (tmp_path / "durations.txt").write_text("# x\n" + "".join(f"{s} test_{name}\n" for name, s in seconds.items()))
    run = [run_pytest(tmp_path, "", "--collect-only", *options) for options in ([], ["-m", "not slow"])]
    found = [[word for word in result.stdout.split() if "::" in word] for result in run]
    order = [
        "e.py::test_quick",
        "b.py::test_x",
        "b.py::test_y",
        "c.py::test_z",
        "d.py::test_two[0]",
        "d.py::test_two[1]",
        "a.py::test_quick",
    ]
    assert found == [[f"test_{name}" for name in order], ["test_a.py::test_quick"]]
