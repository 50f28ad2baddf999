"""Components from outside of Lemma: a class in a file, and a package that is really installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lemma.config.registry import Registry, forget_files, outside_files
from lemma.core.errors import UserError
from lemma.formats import FORMATS, make_format
from lemma.recipe import Recipe, load_recipe
from lemma.rewards import REWARDS, make_reward

ROOT = Path(__file__).resolve().parents[2]

REWARD = '''
from lemma.rewards import Reward, RewardInput


class Brevity(Reward):
    """1 for few tokens."""

    limit: int = 5
    """Maximum number of tokens."""

    def score(self, item: RewardInput) -> float | None:
        return float(len(item.ids) <= self.limit)


def politeness(item):
    return 1.0


NUMBER = 3
'''
FORMAT = '''
from lemma.formats.question_only import QuestionOnly


class Shout(QuestionOnly):
    """The question, and nothing else."""

    name: str = ""
    marks: int = 1
    """Number of exclamation marks."""
'''
ALGORITHM = """
from lemma.algorithms.grpo import Grpo


class Louder(Grpo):
    name: str = ""
    volume: float = 1.0
"""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    forget_files()
    for name, text in {"rewards": REWARD, "formats": FORMAT, "algorithms": ALGORITHM}.items():
        (tmp_path / f"my_{name}.py").write_text(text)
    return tmp_path


def write(folder: Path, stage: str, top: str = "") -> Path:
    path = folder / "recipe.yaml"
    path.write_text(f"run: {{dir: out}}\n{top}\nstages:\n  rl:\n    kind: rl\n{stage}")
    return path


STAGE = """\
    algorithm: {name: "my_algorithms.py:Louder", volume: 2}
    rewards:
      - accuracy
      - my_rewards.py:politeness
      - my_rewards.py:Brevity
      - {name: "my_rewards.py:Brevity", limit: 3, weight: 0.5}
      - {name: "my_rewards.py:politeness", weight: 2}
"""


def test_a_recipe_names_classes_of_files(files: Path) -> None:
    recipe = load_recipe(write(files, STAGE, "format: my_formats.py:Shout"), ["stages.rl.algorithm.volume=3"])
    stage = recipe.stages["rl"].model_dump()
    assert recipe.format.model_dump()["marks"] == 1 and recipe.format.name == "my_formats.py:Shout"
    assert (stage["algorithm"]["name"], stage["algorithm"]["volume"]) == ("my_algorithms.py:Louder", 3.0)
    rewards = recipe.stages["rl"].rewards  # type: ignore[attr-defined]
    assert [reward.label for reward in rewards] == ["accuracy", "politeness", "Brevity", "Brevity", "politeness"]
    assert [getattr(reward, "limit", None) for reward in rewards] == [None, None, 5, 3, None]
    assert [reward.weight for reward in rewards] == [1, 1, 1, 0.5, 2]


def test_a_written_recipe_is_the_same_recipe(files: Path) -> None:
    recipe = load_recipe(write(files, STAGE, "format: {name: 'my_formats.py:Shout', marks: 4}"))
    (files / "again.yaml").write_text(recipe.to_yaml())
    again = load_recipe(files / "again.yaml")
    assert again == recipe and again.digest() == recipe.digest()
    other = recipe.model_dump(mode="json")
    other["format"]["marks"] = 5
    assert Recipe.model_validate(other).digest() != recipe.digest()


@pytest.mark.parametrize(
    ("stage", "sentence"),
    [
        (
            "    algorithm: absent.py:Louder\n",
            "recipe.yaml:6: stages.rl.algorithm: there is no file 'absent.py'; correct",
        ),
        ("    algorithm: my_algorithms.py:Loud\n", "there is no 'Loud'; did you mean 'Louder'?"),
        (
            "    algorithm: {name: 'my_algorithms.py:Louder', volum: 2}\n",
            "recipe.yaml:6: unknown key 'stages.rl.algorithm.volum'; did you mean 'volume'?",
        ),
        (
            "    algorithm: {name: 'my_algorithms.py:Louder', volume: loud}\n",
            "recipe.yaml:6: 'stages.rl.algorithm.volume' cannot be 'loud'; write a number",
        ),
        ("    algorithm: my_rewards.py:Brevity\n", "'my_rewards.py:Brevity' is not an Algorithm; derive it from"),
        ("    rewards: [{name: 'my_rewards.py:Brevity', limit: x}]\n", "'stages.rl.rewards.0.limit' cannot be 'x'"),
        ("    rewards: [brevit]\n", "'stages.rl.rewards.0' cannot be 'brevit'"),
    ],
)
def test_mistakes_get_one_sentence(files: Path, stage: str, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        load_recipe(write(files, stage))
    assert sentence in str(caught.value)


def test_a_class_that_fixes_its_name_is_refused(files: Path) -> None:
    text = ALGORITHM.replace('name: str = ""', 'name: Literal["louder"] = "louder"')
    (files / "named.py").write_text(f"from typing import Literal\n{text}")
    with pytest.raises(UserError, match="has a field `name` that allows one name only; remove the field"):
        load_recipe(write(files, "    algorithm: named.py:Louder\n"))


def test_makers_know_files_as_well(files: Path) -> None:
    assert make_format({"name": "my_formats.py:Shout", "marks": 2}).model_dump()["marks"] == 2
    assert make_reward("my_rewards.py:Brevity").label == "Brevity"
    assert make_reward("my_rewards.py:politeness").name == "custom"
    with pytest.raises(UserError, match="has no option 'mark'; did you mean 'marks'"):
        make_format({"name": "my_formats.py:Shout", "mark": 2})
    with pytest.raises(UserError, match="'NUMBER' is not a function"):
        make_reward("my_rewards.py:NUMBER").check()


def test_files_in_use_are_known(files: Path) -> None:
    recipe = load_recipe(write(files, STAGE))
    assert outside_files(recipe) == [Path("my_algorithms.py"), Path("my_rewards.py")]
    assert outside_files(load_recipe(write(files, "    algorithm: grpo\n"))) == []


def test_a_changed_file_is_read_anew_after_it_is_forgotten(files: Path) -> None:
    assert make_reward("my_rewards.py:Brevity").model_dump()["limit"] == 5
    (files / "my_rewards.py").write_text(REWARD.replace("limit: int = 5", "limit: int = 50"))
    assert make_reward("my_rewards.py:Brevity").model_dump()["limit"] == 5, "a run never changes under way"
    forget_files()
    assert make_reward("my_rewards.py:Brevity").model_dump()["limit"] == 50


def test_a_plain_registry_is_a_dictionary() -> None:
    numbers: Registry[int] = Registry("numbers", int, {"one": 1})
    assert numbers.find("one") == 1 and numbers.find("two") is None and numbers.names() == ["one"]
    assert FORMATS.find("boxed") is FORMATS["boxed"] and REWARDS.find("nothing") is None


PROJECT = """\
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "tiny-lemma-extras"
version = "0.1"

[project.entry-points."lemma.rewards"]
brevity = "tiny_extras:Brevity"
broken = "tiny_extras:Missing"

[project.entry-points."lemma.formats"]
shout = "tiny_formats:Shout"

[tool.setuptools]
py-modules = ["tiny_extras", "tiny_formats"]
"""
LOOK = """
import sys
from lemma.core.errors import UserError
from lemma.recipe import load_recipe

recipe = load_recipe(sys.argv[1])
print(recipe.format.name, [(reward.label, reward.limit) for reward in recipe.stages["rl"].rewards])
for wrong in ("broken", "brevit"):
    try:
        load_recipe(sys.argv[1], [f"stages.rl.rewards=[{wrong}]"])
    except UserError as error:
        print(error)
"""


@pytest.mark.slow(8)
def test_an_installed_package_brings_components(files: Path) -> None:
    project, target = files / "project", files / "site"
    project.mkdir()
    (project / "pyproject.toml").write_text(PROJECT)
    (project / "tiny_extras.py").write_text(REWARD)
    (project / "tiny_formats.py").write_text(FORMAT)
    install = ["-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-build-isolation", "--target", str(target)]
    subprocess.run([sys.executable, *install, str(project)], check=True, capture_output=True)
    recipe = write(files, "    rewards: [{name: brevity, limit: 7}]\n", "format: shout")
    paths = os.pathsep.join([str(ROOT), str(target)])
    look = subprocess.run(
        [sys.executable, "-c", LOOK, str(recipe)],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
    )
    found, broken, misspelt = look.stdout.splitlines()
    assert found == "shout [('brevity', 7)]"
    assert "'broken' of the package tiny-lemma-extras cannot be imported: AttributeError" in broken
    assert "repair tiny_extras:Missing" in broken
    assert "did you mean 'brevity'?" in misspelt


def test_code_from_outside_has_a_deadline_and_stays_off_the_engine(files: Path) -> None:
    outside = [make_reward("my_rewards.py:Brevity"), make_reward("my_rewards.py:politeness")]
    assert all(reward.seconds_each == 300 and reward.may_use_device for reward in outside)
    assert make_reward("accuracy").seconds_each is None and not make_reward("accuracy").may_use_device
    assert make_reward({"name": "reward_model", "path": "x"}).may_use_device


def test_a_recipe_finds_what_lies_beside_it_from_anywhere(
    files: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = write(files, "    rewards: [my_rewards.py:politeness]\n")
    here, digest = [reward.label for reward in load_recipe(recipe).stages["rl"].rewards], load_recipe(recipe).digest()
    assert outside_files(load_recipe(recipe)) == [Path("my_rewards.py")], "as it is written"
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.chdir(elsewhere)
    assert [reward.label for reward in load_recipe(recipe).stages["rl"].rewards] == here
    assert outside_files(load_recipe(recipe)) == [files / "my_rewards.py"]
    assert load_recipe(recipe).digest() == digest, "the run that was begun there goes on"
    (elsewhere / "other.py").write_text("def kind(completion, problem):\n    return 1.0\n")
    moved = write(files, "    rewards: [other.py:kind]\n")
    assert outside_files(load_recipe(moved)) == [Path("other.py")], "or else from the current folder"
