"""An environment of one's own: a class in a file, as `path.py:Class`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from lemma.core.errors import UserError, nearest
from lemma.environments.environment import Environment, EnvironmentOptions


class CustomWorld(EnvironmentOptions):
    """A class of one's own with `reset`, `step` and `score`."""

    name: Literal["custom"] = "custom"
    """A class in a file."""
    class_: str = Field("", alias="class")
    """The class, as `path/to/file.py:Name`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the class."""

    def make(self) -> Environment:
        return load_class(self.class_)(**self.options)

    def check(self) -> None:
        load_class(self.class_)


def load_class(place: str) -> Any:
    """The class that `path.py:Name` names."""
    file, colon, name = place.rpartition(":")
    if not colon or not file.endswith(".py"):
        raise UserError(f"'{place}' names no class in a file", fix="write for example `class: my_world.py:Guess`")
    path = Path(file).expanduser()
    if not path.is_file():
        raise UserError(f"there is no file '{file}'", fix="correct the path of the environment's class")
    namespace: dict[str, Any] = {"__name__": path.stem, "__file__": str(path)}
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), namespace)
    if not isinstance(namespace.get(name), type):
        names = [key for key, value in namespace.items() if isinstance(value, type) and not key.startswith("_")]
        raise UserError(f"'{file}' has no class '{name}'", fix=nearest(name, names))
    return namespace[name]
