"""The class in docs/environments.md plays."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from lemma.core.types import Problem
from lemma.environments import ENVIRONMENTS, Action

PAGE = (Path(__file__).parents[1] / "docs" / "environments.md").read_text(encoding="utf-8")


def test_the_class_of_the_page_plays() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    world = names["Guess"]()
    world.reset(Problem((), ("7",), id="p"), 0)
    assert [world.step(Action(text)).text for text in ("x", "9", "3")] == ["Write one number.", "lower", "higher"]
    assert world.score().reward == 0.0
    assert world.step(Action("7")).done and world.score().success


def test_every_environment_is_on_the_page() -> None:
    assert set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)) == set(ENVIRONMENTS.everything())
