"""A run that uses code of one's own goes on with the same code, or says that it changed."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from lemma.config.registry import forget_files
from lemma.core import faults
from lemma.core.errors import UserError
from lemma.recipe import Recipe, load_recipe
from tests.stages.sft_world import World

FORMAT = """
from lemma.formats.r1_zero import R1Zero


class Short(R1Zero):
    name: str = ""
    preamble: bool = False
"""
BENCHMARK = """
from lemma.core.types import Message, Problem
from lemma.evaluation.benchmarks import Benchmark


class Sums(Benchmark):
    def problems(self):
        return [Problem((Message("user", f"2 + {n} ?"),), golds=(str(2 + n),)) for n in range(3)]
"""


def recipe(world: World) -> Recipe:
    world.recipe({"steps": 4, "validation": {}, "checkpoint": {"every": 2}})
    path = world.folder / "recipe.yaml"
    content = yaml.safe_load(path.read_text())
    content["format"] = f"{world.folder}/own_format.py:Short"
    content["stages"]["sft"]["eval"] = {"benchmarks": [f"{world.folder}/own_bench.py:Sums"], "max_tokens": 4}
    path.write_text(yaml.safe_dump(content))
    return load_recipe(path)


@pytest.mark.slow(8)
def test_code_that_changes_between_two_starts_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_files()
    code = tmp_path / "own_format.py"
    code.write_text(FORMAT)
    (tmp_path / "own_bench.py").write_text(BENCHMARK)
    world = World(tmp_path)
    monkeypatch.setattr(faults, "_visits", type(faults._visits)())
    monkeypatch.setenv("LEMMA_FAULT", "stage.step_end:3:EIO")
    with pytest.raises(OSError):
        world.train(recipe(world))
    monkeypatch.delenv("LEMMA_FAULT")
    code.write_text(FORMAT.replace("False", "True"))
    with pytest.raises(UserError, match=r"the code in .*own_format\.py is not what stage sft was trained with until"):
        world.train(recipe(world))
    code.write_text(FORMAT)
    assert world.train(recipe(world)) == 0
    rows = [row for row in world.rows() if row["axis"] == "train"]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    measured = [row for row in world.rows() if "evaluation/Sums/answer_accuracy" in row]
    assert [row["step"] for row in measured] == [0, 4]
