"""The files of the how-to pages work from outside the package, all in one recipe."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import lemma
from lemma.config.registry import forget_files
from lemma.environments import CustomWorld
from lemma.evaluation.benchmarks import find_benchmark, load_benchmark

DOCS = Path(__file__).resolve().parents[1] / "docs"
FILES = {
    "my_rewards.py": "how-to/add-a-reward.md",
    "workshop.py": "how-to/add-a-format.md",
    "my_benchmark.py": "how-to/add-a-benchmark.md",
    "ranked.py": "how-to/add-an-algorithm.md",
    "guess.py": "environments.md",
}


def first(page: str, language: str = "python") -> str:
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[0]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    forget_files()
    for name, page in FILES.items():
        assert name == "guess.py" or f"`{name}`" in (DOCS / page).read_text(encoding="utf-8")
        (tmp_path / name).write_text(first(page), encoding="utf-8")
    return tmp_path


def recipe(**stage: Any) -> dict[str, Any]:
    return {
        "run": {"dir": "run", "device": "cpu", "threads": 1, "tensorboard": False},
        "model": {"tiny": {"hidden": 32, "layers": 1, "feed_forward": 32, "heads": 4, "kv_heads": 4, "context": 128}},
        "stages": {"rl": {"kind": "rl", "steps": 1, "rollout": {"max_tokens": 4}, "batch": {"problems": 2}, **stage}},
    }


@pytest.mark.slow(15)
def test_every_file_of_the_how_to_pages_runs_in_a_recipe(files: Path) -> None:
    wanted = recipe(
        algorithm={**yaml.safe_load(first(FILES["ranked.py"], "yaml"))["algorithm"], "group_size": 2},
        rewards=yaml.safe_load(first(FILES["my_rewards.py"], "yaml"))["rewards"],
        data={"arithmetic": {"count": 10}},
        eval={"benchmarks": ["my_benchmark.py:Sums"], "max_tokens": 4, "limit": 3},
    )
    wanted |= yaml.safe_load(first(FILES["workshop.py"], "yaml").replace("Show your work.", "work"))
    run = lemma.train(wanted, console=False)
    assert run.state == "finished"
    (row,) = run.metrics("rl", "train")
    assert {"rewards/brevity/absent", "rewards/brevity_2/absent", "rewards/Brevity/absent"} <= set(row.values)
    assert [one.report.settings["Sums"]["source"] for one in run.evaluations()] == ["my_benchmark.py:Sums"] * 2
    assert run.recipe.format.name == "workshop.py:Workshop"


def test_the_algorithm_has_at_most_40_lines() -> None:
    assert len(first(FILES["ranked.py"]).splitlines()) <= 40


def test_classes_and_instances_are_benchmarks(files: Path) -> None:
    sums, hard = find_benchmark("my_benchmark.py:Sums"), find_benchmark("my_benchmark.py:HARD_SUMS")
    assert (sums.name, len(load_benchmark(sums).problems)) == ("Sums", 25)
    assert (hard.name, hard.samples, len(load_benchmark(hard).problems)) == ("hard_sums", 4, 100)
    with pytest.raises(lemma.UserError, match="has no training data to take examples from"):
        lemma.evaluate("tiny", "my_benchmark.py:Sums", shots=2, device="cpu", out=files / "out")


def test_a_class_is_an_environment(files: Path) -> None:
    from lemma.config.load import load_values

    found = load_values(lemma.Recipe, recipe(environment="guess.py:Guess"))
    world = found.stages["rl"].environment  # type: ignore[attr-defined]
    assert isinstance(world, CustomWorld) and type(world.make()).__name__ == "Guess"
    assert lemma.Recipe.model_validate(yaml.safe_load(found.to_yaml())) == found
