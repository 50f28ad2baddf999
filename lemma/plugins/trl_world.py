"""An environment class written for TRL: `reset`, public methods that are tools, and `get_reward`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from lemma.config.registry import file_of
from lemma.core.async_calls import result_of
from lemma.core.errors import UserError
from lemma.core.types import Message, Outcome, Problem
from lemma.data.columns import ROW
from lemma.environments.custom_world import check_takes, load_class
from lemma.environments.environment import Environment
from lemma.environments.tools import Function, ToolOptions, ToolWorld
from lemma.formats.tool_schema import Tool

NO_TOOLS = ("reset", "get_reward")


class TrlEpisode(ToolWorld):
    """One object of the class, in one episode. Its methods may be `async`."""

    def __init__(self, inner: Any, calls_per_turn: int):
        self._inner = inner
        functions: dict[str, Function] = {
            name: partial(_call, getattr(inner, name)) for name, _ in tool_methods(type(inner))
        }
        super().__init__(functions, calls_per_turn)

    def reset(self, problem: Problem, seed: int) -> Sequence[Message]:
        """The text that TRL appends to the last question, as a message; `TrlWorld.introduced` appends it."""
        said = _call(self._inner.reset, **_taken(self._inner.reset, columns_of(problem)))
        return [Message("user", str(said))] if said else []

    def score(self) -> Outcome:
        reward = _call(self._inner.get_reward)
        return Outcome(None) if reward is None else Outcome(float(reward), float(reward) >= 1.0)


def _call(method: Callable[..., Any], **arguments: Any) -> Any:
    return result_of(method(**arguments))


class TrlWorld(ToolOptions):
    """A class written for TRL's `environment_factory`."""

    # `class` is a Python keyword: recipes can say it, but the field needs another name.
    model_config = ConfigDict(serialize_by_alias=True)

    name: Literal["trl"] = "trl"
    """A class written for TRL."""
    class_: str = Field("", alias="class")
    """The class, as `path/to/file.py:Name`: `reset`, public methods that are tools, and `get_reward`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the class."""
    workers: int = Field(2, ge=0)
    """Processes that the environments run in. 0 runs them in the trainer's process, where a call that hangs cannot be
    stopped."""

    needs_columns: ClassVar[bool] = True
    """Problems keep the row that they came from: `reset` gets its columns."""

    def tools(self) -> Sequence[Tool]:
        return [Tool.of(method, name) for name, method in tool_methods(load_class(self.class_))]

    def make(self) -> Environment:
        return TrlEpisode(load_class(self.class_)(**self.options), self.calls_per_turn)

    def introduced(self, problem: Problem, messages: Sequence[Message]) -> Problem:
        """The problem with the text of `reset` appended to its last question, as TRL does."""
        if messages and problem.messages:
            last = problem.messages[-1]
            told = replace(last, content=last.content + "".join(one.content for one in messages))
            problem = replace(problem, messages=(*problem.messages[:-1], told))
        return super().introduced(problem, ())

    def check(self) -> None:
        world_class = load_class(self.class_)
        for name in NO_TOOLS:
            if not callable(getattr(world_class, name, None)):
                raise UserError(
                    f"class {world_class.__name__} has no method `{name}`",
                    file=file_of(self.class_),
                    fix="give it `reset(self, **kwargs)`, `get_reward(self)`, and methods that are tools",
                )
        if not tool_methods(world_class):
            raise UserError(
                f"class {world_class.__name__} has no tool: a public method with a docstring", file=file_of(self.class_)
            )
        check_takes(self.class_, self.options)


def tool_methods(world_class: type) -> list[tuple[str, Function]]:
    """The public methods of a class, by name, without properties."""
    members = inspect.getmembers(world_class, predicate=inspect.isfunction)
    return [(name, method) for name, method in members if not name.startswith("_") and name not in NO_TOOLS]


def columns_of(problem: Problem) -> dict[str, Any]:
    """What TRL passes to `reset`: the columns of the row, including the prompt."""
    row: Mapping[str, Any] = problem.extra.get(ROW) or {}
    known: dict[str, Any] = {"prompt": [message.as_dict() for message in problem.messages]}
    return known | ({} if problem.gold is None else {"answer": problem.gold}) | dict(row)


def _taken(method: Callable[..., Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that the method takes: all of them with `**kwargs`, otherwise those it names."""
    parameters = inspect.signature(method).parameters
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return dict(known)
    return {name: value for name, value in known.items() if name in parameters}
