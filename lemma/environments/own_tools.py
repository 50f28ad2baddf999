"""Tools of your own: functions in a file. The stage's rewards score the last turn."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import wraps
from typing import Any, ClassVar, Literal

from pydantic import Field

from lemma.config.registry import file_of
from lemma.core.async_calls import result_of
from lemma.core.errors import UserError
from lemma.core.types import Message, Problem
from lemma.environments.custom_world import load_named
from lemma.environments.environment import Environment
from lemma.environments.tools import Function, ToolOptions, ToolWorld
from lemma.formats.tool_schema import Tool


class OwnTools(ToolOptions):
    """Your own functions as tools. A turn that calls none is the last, and the stage's rewards score it."""

    name: Literal["tools"] = "tools"
    """Functions in a file."""
    functions: list[str] = Field(default_factory=list)
    """The functions, each as `path/to/file.py:name`; type hints and docstring tell the model what each takes and
    does."""
    turns: int = Field(4, ge=1)
    """Maximum number of turns in an episode; a turn without a tool call ends it and is the answer."""
    workers: int = Field(2, ge=0)
    """Processes that run tool calls while others generate. 0: the trainer's process, where a call that hangs cannot be
    stopped."""

    is_graded: ClassVar[bool] = True
    says_first: ClassVar[bool] = False

    def tools(self) -> Sequence[Tool]:
        return [Tool.of(load_tool(place), _name(place)) for place in self.functions]

    def make(self) -> Environment:
        return _Desk({_name(place): _waited_for(load_tool(place)) for place in self.functions}, self.calls_per_turn)

    def check(self) -> None:
        if not self.functions:
            raise UserError("the environment has no tools", fix="write `functions: [my_tools.py:search]`")
        names = [_name(place) for place in self.functions]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise UserError(f"two tools are called '{twice}'", fix="rename one of the functions")
        for place in self.functions:
            _check(place)


class _Desk(ToolWorld):
    """Functions have no state per episode, so there is nothing to reset."""

    def reset(self, problem: Problem, seed: int) -> Sequence[Message]:
        return ()


def load_tool(place: str) -> Function:
    """The function that `path.py:name` names."""
    hint = "name functions; a class whose methods are tools is `environment: {name: trl, class: ...}`"
    return load_named(place, "function", "my_tools.py:search", hint)


def _check(place: str) -> None:
    """Refuse a function that a model cannot call, or would not know how to."""
    tool, name, file = load_tool(place), _name(place), file_of(place)
    if not inspect.getdoc(tool):
        raise UserError(
            f"tool '{name}' has no docstring, so the model would not know what it does",
            file=file,
            fix="write one, with `Args:` and a line for each argument",
        )
    try:
        parameters = inspect.signature(tool).parameters.values()
    except ValueError:  # as many builtins
        raise UserError(
            f"tool '{name}' has no readable signature", file=file, fix="write a function around it"
        ) from None
    unnamed = next((one.name for one in parameters if one.kind is one.POSITIONAL_ONLY), None)
    if unnamed is not None:
        raise UserError(
            f"tool '{name}' takes '{unnamed}' by its position only, and a model names arguments",
            file=file,
            fix="remove the `/` from its arguments",
        )


def _name(place: str) -> str:
    return place.rpartition(":")[2]


def _waited_for(tool: Function) -> Function:
    """The function, and what it promises where it is `async`."""

    @wraps(tool, updated=())
    def called(**arguments: Any) -> Any:
        return result_of(tool(**arguments))

    return called
