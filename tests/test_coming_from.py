"""Every row of docs/coming-from.md is true: rows are read, settings are accepted, commands are parsed."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from lemma.cli.parser import Parser
from lemma.data.data_options import DataOptions
from lemma.data.load_rows import load_rows
from lemma.recipe import load_recipe
from lemma.stages.reinforcement.rl_options import ReinforcementOptions

PAGE = Path(__file__).resolve().parents[1] / "docs" / "coming-from.md"
RECIPE = {"stages": {"sft": {}, "grpo": {}, "ppo": {}, "rloo": {}, "dpo": {"data": {"source": "pairs.jsonl"}}}}


def table(name: str) -> list[list[str]]:
    """The rows of one table, cell by cell; a bar inside backquotes separates nothing."""
    block = PAGE.read_text(encoding="utf-8").split(f"<!-- tested: {name} -->\n")[1].split("<!-- end -->")[0]
    lines = block.strip().splitlines()[2:]
    return [[cell.strip() for cell in re.findall(r"((?:`[^`]*`|[^|`])+)", line)] for line in lines]


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]*)`", cell)


@pytest.mark.parametrize("cells", table("data"), ids=lambda cells: cells[0])
def test_the_row_is_read_as_the_page_says(cells: list[str], tmp_path: Path) -> None:
    _, row, kind, options = cells
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(json.loads(code(row)[0])) + "\n")
    chosen = yaml.safe_load(code(options)[0]) if code(options) else {}
    [item] = load_rows(DataOptions(source=str(path), **chosen), seed=0)
    assert type(item).__name__.lower() == kind
    assert "2+2?" in str(item) or "Two and two" in str(item) or "2 and 2" in str(item)


@pytest.mark.parametrize("cells", table("settings"), ids=lambda cells: cells[1])
def test_the_setting_exists_and_is_kept(cells: list[str], tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    settings = code(cells[2])
    assert settings
    written = load_recipe(path, settings).model_dump(mode="json")
    for setting in settings:
        place, _, value = setting.partition("=")
        found = written
        for step in place.split("."):
            found = found[step]
        wanted = yaml.safe_load(value)
        name = found.get("name") if isinstance(found, dict) else found
        assert name == wanted or name == pytest.approx(float(wanted)), setting


@pytest.mark.parametrize("cells", table("commands"), ids=lambda cells: cells[1])
def test_the_command_is_understood(cells: list[str]) -> None:
    [command] = code(cells[2])
    program, *arguments = shlex.split(command)
    assert program == "lemma"
    parser = Parser(prog="lemma")
    importlib.import_module(f"lemma.cli.{arguments[0]}").add(parser.add_subparsers())
    options, unknown = parser.parse_known_args(arguments)
    assert callable(options.run) and not unknown


def blocks(language: str, word: str) -> str:
    """The one example in this language that holds the word."""
    page = PAGE.read_text(encoding="utf-8")
    [found] = [one for one in re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL) if word in one]
    return str(found)


def test_the_recipe_says_what_the_script_says(tmp_path: Path) -> None:
    functions = "".join(f"def {name}(completions, **columns): ...\n" for name in ("accuracy_reward", "brevity_reward"))
    (tmp_path / "my_rewards.py").write_text(functions)
    (tmp_path / "recipe.yaml").write_text(blocks("yaml", "my_rewards.py"))
    stage = load_recipe(tmp_path / "recipe.yaml").stages["grpo"]
    assert isinstance(stage, ReinforcementOptions)
    settings = dict(re.findall(r"(\w+)=([\d.e-]+)", blocks("python", "GRPOConfig")))
    said = {name: float(value) for name, value in settings.items()}
    rows = said["per_device_train_batch_size"] * said["gradient_accumulation_steps"]
    assert stage.batch.problems * stage.algorithm.group_size == rows
    assert (stage.steps, stage.optim.lr) == (said["max_steps"], said["learning_rate"])
    # What transformers' Trainer does where a script says nothing.
    assert (stage.optim.schedule, stage.optim.betas) == ("linear", (0.9, 0.999))
    assert (stage.optim.clip, stage.optim.weight_decay, stage.optim.warmup) == (1.0, 0.0, 0.0)
    assert (stage.rollout.max_tokens, stage.rollout.temperature) == (said["max_completion_length"], said["temperature"])
    assert (stage.algorithm.group_size, stage.checkpoint.every) == (said["num_generations"], said["save_steps"])
    assert [(reward.name, reward.weight) for reward in stage.rewards] == [("trl", 1.0), ("trl", 0.2)]
