"""A run that is asked to stop while nobody reads what it says saves all the same, and goes on to the same end."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from lemma.learning.checkpoint import CheckpointStore
from tests.preloaded import Python
from tests.stages.sft_world import World

READER_GONE = 141


# `python -m lemma train RECIPE >&- 2>&-`
WITHOUT_OUTPUT = """
import os, sys
os.close(1)
os.close(2)
sys.stdout = sys.stderr = None
from lemma.cli import main
sys.exit(main())
"""


def check_saved(world: World, finished: World) -> None:
    """Asked to stop after step 2, it saved step 3."""
    assert not world.final().exists()
    assert (world.run / "stages" / "sft" / "checkpoints" / "step-00000003" / "manifest.json").is_file()
    assert world.rows()[-1]["step"] == 3
    assert world.train(world.recipe()) == 0
    assert world.numbers() == finished.numbers() and world.weights() == finished.weights()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("outputs", [[2], [1, 2]], ids=["stderr", "both"])
def test_a_closed_pipe(world: World, finished: World, name: str, outputs: list[int]) -> None:
    world.recipe()
    reading, writing = os.pipe()
    os.close(reading)
    files = {"stdout": writing if 1 in outputs else subprocess.DEVNULL, "stderr": writing}
    environment = os.environ | {"LEMMA_FAULT": f"stage.step_end:2:{name}"}
    process = Python(["-m", "lemma", "train", world.folder / "recipe.yaml"], env=environment, **files)
    os.close(writing)
    assert process.wait(100) in (0, READER_GONE)
    check_saved(world, finished)


def test_no_output_at_all(world: World, finished: World) -> None:
    """Numbers 1 and 2 then belong to files of the run, which the words of the handler must not get into."""
    world.recipe()
    environment = os.environ | {"LEMMA_FAULT": "stage.step_end:2:SIGTERM"}
    command = ["-c", WITHOUT_OUTPUT, "train", world.folder / "recipe.yaml"]
    assert Python(command, env=environment).wait(100) == 0
    spoilt = [path for path in world.run.rglob("*") if path.is_file() and b"finishing this step" in path.read_bytes()]
    assert spoilt == list[Path]()
    check_saved(world, finished)


@pytest.mark.parametrize("pause", [0.0, 0.02, 0.2])
def test_ctrl_c_again_and_again(world: World, pause: float) -> None:
    """However quickly they follow each other: a word or two, no traceback, and a run that can go on."""
    recipe = world.folder / "recipe.yaml"
    world.recipe({"steps": 5000, "validation": {}, "checkpoint": {"every": 5}})
    process = Python(["-m", "lemma", "train", recipe], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    metrics = world.run / "metrics.jsonl"
    end = time.monotonic() + 120
    while not (metrics.exists() and metrics.stat().st_size > 5000) and time.monotonic() < end:
        time.sleep(0.05)
    for _ in range(3):
        process.send_signal(signal.SIGINT)
        time.sleep(pause)
    said = process.communicate(timeout=120)[0]
    assert "Traceback" not in said and "Error" not in said and "finishing this step" in said
    assert process.returncode in (0, 130, -signal.SIGINT)
    assert CheckpointStore(world.run / "stages" / "sft" / "checkpoints", 9, print).newest() is not None
