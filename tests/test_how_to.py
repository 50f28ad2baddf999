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
FURTHER = {"distil.py": "how-to/add-an-algorithm.md", "median.py": "how-to/add-an-objective.md"}


def first(page: str, language: str = "python", after: str = "") -> str:
    text = (DOCS / page).read_text(encoding="utf-8")
    text = text[text.index(after) :]
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[0]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    forget_files()
    for name, page in FILES.items():
        assert name == "guess.py" or f"`{name}`" in (DOCS / page).read_text(encoding="utf-8")
        (tmp_path / name).write_text(first(page), encoding="utf-8")
    for name, page in FURTHER.items():
        (tmp_path / name).write_text(first(page, after=f"`{name}`"), encoding="utf-8")
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


def advantages(run: lemma.Run) -> list[float]:
    return [row.values["advantage/mean"] for row in run.metrics("rl", "train")]


@pytest.mark.slow(15)
def test_the_policy_approaches_the_teacher_of_the_how_to(files: Path) -> None:
    """The mean advantage of `distil.py` is minus the KL to the teacher: 0 if that is the policy itself."""
    stage = yaml.safe_load(first(FURTHER["distil.py"], "yaml", after="`distil.py`"))
    data = {"arithmetic": {"count": 40, "operations": 1, "largest": 10}}
    taught = recipe()
    taught["run"]["dir"] = stage["reference_model"]["path"]
    taught["stages"] = {"sft": {"steps": 60, "data": data, "optim": {"lr": 1e-2}, "checkpoint": {"every": 0}}}
    lemma.train(taught, console=False)
    wanted = recipe(**stage, data=data, optim={"lr": 1e-2}, checkpoint={"every": 0})
    wanted["stages"]["rl"] |= {"steps": 8, "batch": {"problems": 64}}
    gaps = advantages(lemma.train(wanted, console=False))
    assert gaps[0] < -1 and gaps[-1] > gaps[0] + 0.25
    alone = {"stages.rl.reference_model": None, "stages.rl.steps": 1, "run.dir": "alone"}
    assert advantages(lemma.train(wanted, alone, console=False)) == [pytest.approx(0.0, abs=1e-6)]


@pytest.mark.slow(10)
def test_the_objective_of_the_how_to_has_the_options_of_the_loss_that_it_wraps(files: Path) -> None:
    named = yaml.safe_load(first(FURTHER["median.py"], "yaml", after="`median.py`"))["algorithm"]
    run = lemma.train(recipe(algorithm=named, data={"arithmetic": {"count": 10}}, rewards=["length"]), console=False)
    (row,) = run.metrics("rl", "train")
    assert row.values["updates"] == 2 and {"shaped", "kl", "ratio/max", "clip/low"} <= set(row.values)


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
