"""Rewards of your own: a function in a Python file, named as `path.py:function`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from numbers import Real
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from lemma.config.registry import is_place, load_place
from lemma.core.async_calls import result_of
from lemma.core.errors import UserError
from lemma.rewards.reward import Reward, WrongReturn
from lemma.rewards.reward_input import RewardInput

TRL_ARGUMENTS = frozenset({"prompts", "completions", "completion_ids"})
Function = Callable[..., float | None]


class FunctionReward(Reward):
    """A reward that is a function in a file; subclasses say how it is called."""

    function: str
    """File and function, such as rewards.py:politeness."""
    options: Mapping[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the function."""
    seconds: float = Field(300.0, gt=0)
    """Time limit per completion, on average if a function takes several at once. A function that takes longer stops the
    run, with an error that names it. An `async` function scores completions concurrently: it is stopped when none of
    them finishes for this long."""

    @property
    def label(self) -> str:
        return self.function.rpartition(":")[2]

    @field_validator("function")
    @classmethod
    def _named(cls, function: str) -> str:
        if not is_place(function):
            raise ValueError(f"'{function}' does not name a function; write `path/to/file.py:function`")
        return function

    @property
    def place(self) -> tuple[str, int | None]:
        code = getattr(load_function(self.function), "__code__", None)
        return self.function.rpartition(":")[0], None if code is None else code.co_firstlineno

    @property
    def seconds_each(self) -> float | None:
        return self.seconds

    @property
    def files(self) -> list[Path]:
        return [Path(self.function.rpartition(":")[0])]

    def check(self) -> None:
        load_function(self.function)


class EachFunction(FunctionReward):
    """A function that takes one completion at a time. An `async` one scores those of a batch at the same time."""

    def call(self, item: RewardInput) -> Any:
        """What the function returns, which is awaitable where the function is `async`."""
        raise AssertionError("a subclass calls the function")

    def value(self, found: Any) -> float | None:
        """The reward in what the function returned."""
        return number_of(found)

    def score(self, item: RewardInput) -> float | None:
        return self.value(result_of(self.call(item), self.seconds))

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(load_function(self.function))

    async def score_async(self, item: RewardInput) -> float | None:
        return self.value(await self.call(item))


class Custom(EachFunction):
    """A function of your own: it gets a RewardInput and the options, and returns a number or None."""

    name: Literal["custom"] = "custom"
    """Which reward."""

    def check(self) -> None:
        function = load_function(self.function)
        try:
            signature = inspect.signature(function)
        except ValueError:
            return  # functions not written in Python may have no signature
        file, line = self.place
        if is_for_trl(function):
            raise UserError(
                f"reward '{self.label}' takes prompts or completions, like functions written for TRL",
                file=file,
                line=line,
                fix=f"write `trl: {self.function}` in the list of rewards, or let it take one RewardInput",
            )
        try:
            signature.bind(None, **self.options)
        except TypeError as error:
            raise UserError(
                f"reward '{self.label}' cannot be called with a RewardInput and its options: {error}",
                file=file,
                line=line,
                fix="let it take the input, and each of the reward's `options` by name",
            ) from error

    def call(self, item: RewardInput) -> Any:
        return load_function(self.function)(item, **self.options)


def is_for_trl(function: Any) -> bool:
    """Whether a function takes whole batches, by TRL's argument names."""
    return callable(function) and not TRL_ARGUMENTS.isdisjoint(parameters_of(function))


def parameters_of(function: Any) -> Mapping[str, inspect.Parameter]:
    """The parameters of a function; none where it is not written in Python and has no readable signature."""
    try:
        return inspect.signature(function).parameters
    except ValueError:
        return {}


def number_of(value: Any) -> float | None:
    """What a function returned, as a reward: true is 1, a tensor of one number is that number."""
    if value is None:
        return None
    if isinstance(value, Real) and math.isfinite(value):
        return float(value)
    if getattr(value, "size", None) == 1 or getattr(value, "shape", None) in ((), (1,)):
        return number_of(value.item())
    raise WrongReturn(
        f"returned {value!r:.200}, which is not a finite number", "return a number, or None for no reward"
    )


def load_function(spec: str) -> Function:
    """The function in its file, which is imported once."""
    function = load_place(spec)
    if not callable(function):
        raise UserError(f"'{spec.rpartition(':')[2]}' is not a function", file=spec.rpartition(":")[0])
    return function
