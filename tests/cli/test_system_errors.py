"""Where the system gives no more memory or threads, or has no such user, that is one sentence."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from lemma.cli import main
from lemma.core.system_errors import explained

HUGE = 2**58


def raised(kind: str) -> Exception:
    try:
        if kind == "torch":
            torch.empty(HUGE, dtype=torch.uint8)
        elif kind == "numpy":
            np.empty(HUGE, dtype=np.uint8)
        else:
            bytes(HUGE)
    except (RuntimeError, MemoryError) as error:
        return error
    raise AssertionError("that much memory was there")


@pytest.mark.parametrize("kind", ["torch", "numpy", "python"])
def test_no_more_memory(kind: str) -> None:
    told = explained(raised(kind))
    assert told is not None
    sentence, code = told
    assert code == 1 and "\n" not in sentence
    assert sentence.startswith("out of host memory") and "`ulimit -v`" in sentence


@pytest.mark.parametrize(
    "error",
    [
        OSError("libcudart.so.12: failed to map segment from shared object"),
        OSError(errno.ENOMEM, "Cannot allocate memory", "weights.bin"),
    ],
)
def test_memory_that_the_system_refuses_a_command(
    error: OSError, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(args: object) -> int:
        raise error

    monkeypatch.setattr("lemma.cli.doctor.run", refused)
    assert main(["doctor"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"lemma: error: out of host memory ({error}); raise the limit") and said.count("\n") == 1


def test_other_errors_are_none_of_these() -> None:
    for error in (
        RuntimeError("shapes differ"),
        ImportError("no module"),
        OSError(errno.EIO, "input/output error"),
        OSError("odd"),
    ):
        assert explained(error) is None


def test_a_command_that_may_start_no_thread(tmp_path: Path) -> None:
    """As under `ulimit -v`, at a moment that is always the same."""
    program = (
        "import sys, threading\n"
        "import lemma.cli\n"
        "import lemma.cli.doctor\n"
        'def no_more(*given): raise RuntimeError("can\'t start new thread")\n'
        "lemma.cli.doctor.run = lambda args: threading.Thread(target=print).start() or 0\n"
        "threading._start_new_thread = no_more\n"
        "sys.argv = ['lemma', 'doctor']\n"
        "sys.exit(lemma.cli.main())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 1 and done.stdout == ""
    assert (
        done.stderr.startswith("lemma: error: the system refused to start another thread")
        and done.stderr.count("\n") == 1
    )


def test_a_home_that_nobody_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recipe.yaml").write_text("model: {path: ~nobody-of-this-name/model}\nstages: {sft: {steps: 1}}\n")
    assert main(["plan", str(tmp_path / "recipe.yaml")]) == 2
    assert capsys.readouterr().err == (
        "lemma: error: the home folder of a path that begins with `~` is not known; write the path in full, or set "
        "HOME\n"
    )
