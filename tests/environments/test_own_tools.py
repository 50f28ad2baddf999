"""Functions of one's own as tools: those of docs/tools.md."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lemma.cli import main
from lemma.core.errors import UserError
from lemma.core.types import Message, Problem
from lemma.environments import OwnTools
from lemma.environments.openings import opened_all
from lemma.environments.tools import understanding
from lemma.formats import make_format
from lemma.formats.tool_prompt import OFFERED, ToolSpeech
from lemma.recipe import load_recipe
from lemma.rewards import make_reward
from lemma.stages.reinforcement.rl_options import ReinforcementOptions

SECTION = (Path(__file__).parents[2] / "docs" / "tools.md").read_text(encoding="utf-8").split("\n## ")[1]
PROBLEM = Problem((Message("user", "Where?"),), ("Paris",), id="p")
MORE = '''

import asyncio

ONE_AT_A_TIME = asyncio.Semaphore(1)


async def later(seconds: float = 0.0) -> str:
    """Wait."""
    await asyncio.gather(wait(), wait())
    return f"after {seconds}"


async def wait() -> None:
    async with ONE_AT_A_TIME:
        await asyncio.sleep(0.001)


def silent(x: int) -> str:
    return "nobody knows what for"


def placed(x: int, /) -> str:
    """Say a number."""
    return str(x)


class Clock:
    """Tells the time."""

    async def __call__(self) -> str:
        return "noon"


clock, largest = Clock(), max
'''


def block(language: str) -> str:
    [found] = re.findall(rf"```{language}\n(.*?)```", SECTION, re.DOTALL)
    return str(found)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_tools.py").write_text(block("python") + MORE)
    (tmp_path / "recipe.yaml").write_text(block("yaml"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_the_recipe_of_the_page_offers_its_functions(folder: Path) -> None:
    stage = load_recipe(folder / "recipe.yaml").stages["rl"]
    assert isinstance(stage, ReinforcementOptions) and isinstance(stage.environment, OwnTools)
    stage.environment.check()
    offered = opened_all(stage.environment, [PROBLEM], 0)[0].extra[OFFERED]["tools"]
    assert [one["function"]["name"] for one in offered] == ["calculator", "search"]
    search = offered[1]["function"]
    assert search["description"] == "Look up the capital of a country."
    assert search["parameters"]["properties"] == {"country": {"type": "string", "description": "Its English name."}}
    without = yaml.safe_load(block("yaml"))["stages"]["rl"]
    del without["rewards"]
    assert ReinforcementOptions.model_validate(without).rewards == [make_reward("accuracy")], "graded, not scored"


def test_an_episode_of_calls(folder: Path) -> None:
    options = OwnTools(functions=[f"my_tools.py:{name}" for name in ("calculator", "search", "later", "clock")])
    understand = understanding(ToolSpeech("hermes", False, tuple(options.tools())), make_format("chat"))
    world = options.make()
    assert not world.reset(PROBLEM, 0)
    reply = world.step(understand(call("search", country="France") + call("calculator", expression="6*7"), "stop"))
    assert (reply.results, reply.done) == (("Paris", "42"), False)
    reply = world.step(understand(call("calculator", expression="import os") + call("later", seconds=0.5), "stop"))
    assert reply.results == ("error: ValueError: only numbers and + - * / ( ) are understood", "after 0.5")
    reply = world.step(understand(call("search", land="France") + call("find", x=1), "stop"))
    assert reply.results[0] == "error: search has no argument 'land'; it takes: country"
    assert reply.results[1].startswith("error: there is no tool 'find'; there are: ")
    assert world.step(understand(call("clock"), "stop")).results == ("noon",)
    assert world.step(understand(call("later"), "stop")).results == ("after 0.0",)
    assert world.step(understand(r"\boxed{Paris}", "stop")).done


@pytest.mark.parametrize(
    ("functions", "sentence"),
    [
        ([], "the environment has no tools; write `functions: [my_tools.py:search]`"),
        (["search"], "'search' names no function in a file; write for example `my_tools.py:search`"),
        (["my_tools.py:serch"], "my_tools.py: there is no 'serch'; did you mean 'search'?"),
        (["my_tools.py:CAPITALS"], "my_tools.py: 'CAPITALS' is not a function; name functions; a class whose"),
        (["my_tools.py:search", "./my_tools.py:search"], "two tools are called 'search'; rename one"),
        (["my_tools.py:placed"], "my_tools.py: tool 'placed' takes 'x' by its position only, and a model names"),
        (["my_tools.py:largest"], "my_tools.py: tool 'largest' has no readable signature; write a function around"),
        (["my_tools.py:silent"], "my_tools.py: tool 'silent' has no docstring, so the model would not know"),
    ],
)
def test_what_is_no_tool_is_refused(folder: Path, functions: list[str], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        OwnTools(functions=functions).check()
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize("command", ["test", "play"])
def test_what_training_refuses_is_not_played(folder: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    (folder / "questions.jsonl").write_text('{"question": "Where?", "answer": "Paris"}\n')
    chosen = "stages.rl.environment.functions=[my_tools.py:silent]"
    assert main(["env", command, "recipe.yaml", "--set", chosen]) == 2
    assert "tool 'silent' has no docstring" in capsys.readouterr().err
