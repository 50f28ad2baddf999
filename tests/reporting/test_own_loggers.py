"""Loggers are looked up by name; those of a file hear every event, and none of them ends a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from lemma.config.registry import forget_files
from lemma.core.errors import UserError
from lemma.core.events import Measured, Said
from lemma.reporting import make_sink
from lemma.reporting.sinks import LOGGERS

CODE = """
import json

class ToFile:
    def __init__(self, run_dir, recipe):
        self.path, self.seed, self.rows = run_dir / "mine.json", recipe["seed"], []

    def __call__(self, event):
        if type(event).__name__ == "Measured":
            self.rows.append(event.values["loss"])

    def close(self, failed):
        self.path.write_text(json.dumps([self.seed, self.rows, failed]))

def broken(event):
    raise KeyError("nothing")

class Stillborn:
    def __init__(self, run_dir, recipe):
        raise RuntimeError("no server")

NUMBER = 3
"""


@pytest.fixture
def code(tmp_path: Path) -> str:
    forget_files()
    (tmp_path / "own.py").write_text(CODE)
    return str(tmp_path / "own.py")


def run(folder: Path, *loggers: str) -> None:
    with make_sink(folder, tensorboard=False, wandb=None, recipe={"seed": 7}, console=False, loggers=loggers) as sink:
        for step in (1, 2):
            sink(Measured("sft", step, "train", {"loss": 1 / step}))
        sink(Said("the end"))


def test_a_class_of_a_file_hears_everything(tmp_path: Path, code: str) -> None:
    run(tmp_path, f"{code}:ToFile")
    assert (tmp_path / "mine.json").read_text() == "[7, [1.0, 0.5], false]"


def test_a_function_that_fails_is_dropped_and_the_others_go_on(tmp_path: Path, code: str) -> None:
    run(tmp_path, f"{code}:broken", f"{code}:ToFile")
    log = (tmp_path / "run.log").read_text()
    assert log.count("broken failed ('nothing'); the run continues without it") == 1 and "the end" in log
    assert (tmp_path / "mine.json").is_file()


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("tensorbord", "there is no logger 'tensorbord'; did you mean 'tensorboard'?"),
        ("own.py:Stillborn", "does not start (RuntimeError: no server); repair it, or leave it out of run.loggers"),
        ("own.py:NUMBER", "there is no logger"),
        ("own.py:ToFle", "there is no 'ToFle'; did you mean 'ToFile'?"),
    ],
)
def test_a_wrong_logger_is_told_before_the_run(tmp_path: Path, code: str, name: str, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        run(tmp_path / "run", name.replace("own.py", code))
    assert sentence in str(caught.value) and not (tmp_path / "run").exists()


def test_the_loggers_of_lemma_are_in_the_registry() -> None:
    assert {"console", "run.log", "tensorboard", "wandb"} <= set(LOGGERS)
