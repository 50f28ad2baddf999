"""A custom environment: a class in a file, as `path.py:Class`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from traceback import extract_tb
from typing import Any, Literal

from pydantic import ConfigDict, Field

from lemma.config.registry import file_of, is_place, load_place
from lemma.core.errors import Interruption, UserError
from lemma.core.outside import OutsideCode
from lemma.core.types import Problem
from lemma.environments.environment import Attempt, Deadlines, Environment, EnvironmentOptions

# Calls that a worker makes at the same time if they are `async`.
ASYNC_CALLS = 256


class CustomWorld(EnvironmentOptions):
    """Your own class with `reset`, `step` and `score`."""

    # `class` is a Python keyword: recipes can say it, but the field needs another name.
    model_config = ConfigDict(serialize_by_alias=True)

    name: Literal["custom"] = "custom"
    """A class in a file."""
    class_: str = Field("", alias="class")
    """The class, as `path/to/file.py:Name`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the class."""
    workers: int = Field(2, ge=0)
    """Processes that the environments run in. 0 runs them in the trainer's process, where a call that hangs cannot be
    stopped."""

    @property
    def label(self) -> str:
        return self.class_.rpartition(":")[2]

    def problems(self, split: str) -> Sequence[Problem] | None:
        """From the class's static method `problems`, if it has one."""
        return self._static("problems", None, split)

    def summarise(self, attempts: Sequence[Attempt]) -> Mapping[str, Sequence[float]]:
        """From the class's static method `summarise`, if it has one."""
        return self._static("summarise", {}, attempts)

    def _static(self, name: str, usual: Any, *given: Any) -> Any:
        """What this static method of the class returns; `usual` if it has none."""
        world_class = load_class(self.class_)
        if not isinstance(inspect.getattr_static(world_class, name, None), staticmethod | classmethod):
            return usual
        try:
            with OutsideCode():
                return getattr(world_class, name)(*given)
        except (UserError, KeyboardInterrupt, Interruption):
            raise
        except BaseException as error:
            raise UserError(
                f"`{name}` of the environment {self.label} failed with {type(error).__name__}: {error}",
                file=file_of(self.class_),
                line=extract_tb(error.__traceback__)[-1].lineno,
            ) from error

    def make(self) -> Environment:
        return load_class(self.class_)(**self.options)

    @property
    def deadlines(self) -> Deadlines:
        return self.deadlines_of(load_class(self.class_))

    @property
    def keeps_time(self) -> bool:
        return inspect.iscoroutinefunction(getattr(load_class(self.class_), "step", None))

    @property
    def calls_at_once(self) -> int:
        return self.worker_calls or (ASYNC_CALLS if self.keeps_time else 1)

    def check(self) -> None:
        check_takes(self.class_, self.options)


def check_takes(place: str, options: Mapping[str, Any]) -> None:
    """Refuse options that a class does not take."""
    world_class = load_class(place)
    try:
        inspect.signature(world_class).bind(**options)
    except TypeError as error:
        raise UserError(
            f"class {world_class.__name__} does not take these options: {error}", file=file_of(place),
            fix="change `options` of the environment, or what the class takes",
        ) from error  # fmt: skip


def load_class(place: str) -> Any:
    return load_named(place, "class", "class: my_world.py:Guess")


def load_named(place: str, kind: Literal["class", "function"], example: str, hint: str | None = None) -> Any:
    """The class or function that `path.py:Name` names."""
    if not is_place(place):
        raise UserError(f"'{place}' names no {kind} in a file", fix=f"write for example `{example}`")
    loaded = load_place(place)
    if isinstance(loaded, type) != (kind == "class") or not callable(loaded):
        raise UserError(f"'{place.rpartition(':')[2]}' is not a {kind}", file=file_of(place), fix=hint)
    return loaded
