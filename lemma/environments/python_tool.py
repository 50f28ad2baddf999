"""Math with tools: a calculator and Python, until the policy answers without calling either."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import ClassVar, Literal

from pydantic import Field

from lemma.core.types import Message, Problem
from lemma.environments.calculator import calculator
from lemma.environments.environment import Deadlines, Environment
from lemma.environments.sandbox import START_SECONDS, Sandbox, SandboxLimits
from lemma.environments.tools import Function, ToolOptions, ToolWorld
from lemma.formats.tool_schema import Tool


def python(code: str) -> str:
    """Run a Python program and read what it prints.

    Args:
        code: The program. Variables of earlier programs are still there.
    """
    raise AssertionError("a sandbox runs it")


TOOLS = {"calculator": calculator, "python": python}


@cache
def _tool(name: str) -> Tool:
    return Tool.of(TOOLS[name])


class MathTools(ToolWorld):
    """A calculator, and a sandbox that lives from the first program to the end of the episode."""

    def __init__(self, options: PythonTools):
        self._limits, self._keeps = options.limits, options.keep_variables
        self._sandbox = Sandbox(self._limits)
        known: dict[str, Function] = {"calculator": calculator, "python": self._run}
        super().__init__({name: known[name] for name in options.offers}, options.calls_per_turn)

    def reset(self, problem: Problem, seed: int) -> list[Message]:
        self._sandbox.close()
        self._sandbox = Sandbox(self._limits, seed)
        return []

    def _run(self, code: str) -> str:
        try:
            return self._sandbox.run(code).rstrip("\n") or "(no output)"
        finally:
            if not self._keeps:
                self._sandbox.close()

    def close(self) -> None:
        self._sandbox.close()


class PythonTools(ToolOptions):
    """A calculator and a sandboxed Python, for math with tools. The stage's rewards score the last turn."""

    name: Literal["python"] = "python"
    """Math with tools."""
    turns: int = Field(4, ge=1)
    """Maximum number of turns in an episode; a turn without a tool call ends it and is the answer."""
    offers: list[Literal["calculator", "python"]] = Field(["calculator", "python"], min_length=1)
    """Which tools to offer."""
    seconds: float = Field(5.0, gt=0)
    """Time limit of a program."""
    memory_mb: int = Field(512, ge=64)
    """Memory limit of a program."""
    output: int = Field(4000, ge=1)
    """Maximum number of characters of a program's output; the middle of a longer one is cut out."""
    keep_variables: bool = True
    """Whether a program sees the variables of earlier programs of its episode."""
    workers: int = Field(2, ge=0)
    """Processes that run tool calls while others generate; each program has a process of its own. 0: the trainer's
    process."""
    packages: bool = True
    """Whether a program can import the packages installed with Lemma, such as sympy."""
    isolated: bool = True
    """Refuse to run on a machine that cannot isolate programs from its files, its network and its other processes."""

    is_graded: ClassVar[bool] = True
    says_first: ClassVar[bool] = False

    @property
    def limits(self) -> SandboxLimits:
        return SandboxLimits(self.seconds, self.memory_mb, self.output, self.packages, self.isolated)

    @property
    def deadlines(self) -> Deadlines:
        """Long enough for a turn whose programs all run to their time limit."""
        deadlines = self.deadlines_of(None)
        longest = self.seconds * self.calls_per_turn + START_SECONDS
        return deadlines if self.step_seconds is not None else replace(deadlines, step=max(deadlines.step, longest))

    def tools(self) -> Sequence[Tool]:
        return [_tool(name) for name in self.offers]

    def make(self) -> Environment:
        return MathTools(self)

    def check(self) -> None:
        if "python" in self.offers:
            Sandbox(self.limits).check()
