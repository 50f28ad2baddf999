"""Environment classes written for TRL play here as they do there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import get_json_schema

from lemma.core.errors import UserError
from lemma.core.types import Message, Problem
from lemma.environments import TrlWorld
from lemma.environments.openings import opened_all
from lemma.environments.tools import understanding
from lemma.formats import make_format
from lemma.formats.tool_prompt import OFFERED, ToolSpeech
from lemma.recipe import Recipe
from lemma.rollouts import read_episodes
from lemma.runs.run import train

CLASS = '''
class Doors:
    """Behind one of the doors is a prize."""

    def __init__(self, doors: int = 3):
        self.doors = doors

    def reset(self, *, answer, **kwargs):
        self.prize, self.found, self.seen = int(answer), False, sorted(kwargs)
        return f" There are {self.doors} doors."

    def open_door(self, number: int) -> str:
        """
        Open a door.

        Args:
            number: Which one, counted from 1.

        Returns:
            What is behind it.
        """
        if number > self.doors:
            raise ValueError(f"there is no door {number}")
        self.found = self.found or number == self.prize
        return "the prize" if self.found else "nothing"

    async def knock(self, number: int, times: int = 1) -> str:
        """
        Knock at a door.

        Args:
            number: Which one.
            times: How often.
        """
        return "who is there?" * times

    def _secret(self):
        return self.prize

    def get_reward(self):
        return float(self.found)
'''


@pytest.fixture
def place(tmp_path: Path) -> str:
    (tmp_path / "doors.py").write_text(CLASS)
    return f"{tmp_path / 'doors.py'}:Doors"


def options(place: str, **more: Any) -> TrlWorld:
    return TrlWorld.model_validate({"name": "trl", "class": place, **more})


def test_tools_are_what_trl_makes_of_them(place: str) -> None:
    from lemma.config.registry import load_place

    tools = {tool.name: tool.as_dict()["function"] for tool in options(place).tools()}
    assert set(tools) == {"open_door", "knock"}
    for name, tool in tools.items():
        theirs = get_json_schema(getattr(load_place(place), name))["function"]
        theirs.pop("return", None)
        assert tool == theirs


def test_an_episode_of_tool_calls(place: str) -> None:
    world_options = options(place, options={"doors": 4})
    problem = Problem((Message("user", "Find it."),), ("2",), id="p", extra={"row": {"colour": "red"}})
    opened = opened_all(world_options, [problem], 0)[0]
    assert opened.question == "Find it. There are 4 doors." and len(opened.extra[OFFERED]["tools"]) == 2
    understand = understanding(ToolSpeech("hermes", False, tuple(world_options.tools())), make_format("own"))
    world = world_options.make()
    world.reset(problem, 0)
    assert world._inner.seen == ["colour", "prompt"]  # type: ignore[attr-defined]

    def call(name: str, **arguments: Any) -> str:
        said = json.dumps({"name": name, "arguments": arguments})
        return world.step(understand(f"<tool_call>{said}</tool_call>", "stop")).text

    assert call("open_door", number=9) == "error: ValueError: there is no door 9"
    assert call("knock", number=1, times=2) == "who is there?" * 2
    assert call("_secret").startswith("error: there is no tool '_secret'")
    assert call("open_door", number=1) == "nothing" and world.score().reward == 0.0
    assert call("open_door", number=2) == "the prize"
    assert world.step(understand("Done.", "stop")).done
    assert (world.score().reward, world.score().success) == (1.0, True)
    world.close()


@pytest.mark.filterwarnings("ignore::lemma.core.errors.LemmaWarning")
def test_a_reset_that_hangs_is_a_sentence(place: str, tmp_path: Path) -> None:
    late = "__import__('time').sleep(600 * (answer == '0')); self.prize, self.found"
    text = CLASS.replace("self.prize, self.found", late)
    (tmp_path / "slow.py").write_text(text)
    world_options = options(f"{tmp_path / 'slow.py'}:Doors", workers=1, reset_seconds=2.0)
    problems = [Problem((Message("user", "Find it."),), (gold,), id=gold) for gold in ("1", "2")]
    opened = opened_all(world_options, problems, 0)
    assert [one.question for one in opened] == ["Find it. There are 3 doors."] * 2 and OFFERED in opened[0].extra
    with pytest.raises(UserError, match="cannot begin problem 0: `reset` broke the environment twice"):
        opened_all(world_options, [*problems, Problem((Message("user", "Find it."),), ("0",), id="0")], 0)


@pytest.mark.parametrize(
    ("without", "words"),
    [("def get_reward", "has no method `get_reward`"), ("def open_door|async def knock", "has no tool")],
)
def test_a_class_that_lacks_something_is_refused(without: str, words: str, place: str, tmp_path: Path) -> None:
    text = CLASS
    for part in without.split("|"):
        text = text.replace(part, part.replace("def ", "def _"))
    (tmp_path / "other.py").write_text(text)
    with pytest.raises(UserError, match=words):
        options(f"{tmp_path / 'other.py'}:Doors").check()
    with pytest.raises(UserError, match="does not take these options"):
        options(place, options={"windows": 2}).check()


def test_a_step_of_training(place: str, tmp_path: Path) -> None:
    rows = [{"question": "how many ?", "answer": "1", "colour": "red"}] * 4
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row | {"id": n}) for n, row in enumerate(rows)))
    tiny = {"hidden": 32, "layers": 2, "feed_forward": 64, "heads": 2, "kv_heads": 1, "words": ["<code>", "</code>"]}
    stage = {
        "kind": "rl", "algorithm": {"name": "grpo", "group_size": 4}, "data": {"source": str(tmp_path / "rows.jsonl")},
        "environment": {"name": "trl", "class": place, "turns": 2, "describe": False, "workers": 0},
        "rollout": {"max_tokens": 4}, "batch": {"problems": 2}, "steps": 1, "eval": {"benchmarks": []},
    }  # fmt: skip
    run = {"dir": str(tmp_path / "run"), "threads": 1, "tensorboard": False}
    recipe = {"run": run, "model": {"tiny": tiny}, "format": "r1_zero", "stages": {"rl": stage}}
    assert train(Recipe.model_validate(recipe), sink=lambda event: None) == 0
    episodes = list(read_episodes(tmp_path / "run/stages/rl/journal/step-000001.jsonl"))
    assert len(episodes) == 8 and all(one.rewards == {"environment": 0.0} for one in episodes)
