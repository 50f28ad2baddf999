"""Environments with tools: functions whose results are the reply to a turn's tool calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from lemma.core.types import Finish, Message, Outcome, Problem
from lemma.environments.environment import Action, Environment, EnvironmentOptions, Observation, WorldGone
from lemma.formats import Format
from lemma.formats.tool_calls import Style
from lemma.formats.tool_prompt import ToolSpeech, offer
from lemma.formats.tool_schema import Tool

Function = Callable[..., Any]


class ToolOptions(EnvironmentOptions):
    """An environment whose tools the policy calls, in the spelling of its chat template."""

    calls: Style | Literal["auto"] = "auto"
    """Syntax of tool calls: hermes (`<tool_call>` and JSON, as Qwen writes it), llama, mistral or code (a block of
    ```python or <code>). Default: that of the model's chat template, or hermes if it has none for tools."""
    describe: bool = True
    """Whether the prompt describes the tools: through the chat template, or in words if it has no place for tools."""
    calls_per_turn: int = Field(8, ge=1)
    """Maximum number of tool calls in one turn."""

    def tools(self) -> Sequence[Tool]:
        """The tools that can be called."""
        raise NotImplementedError

    def speech(self, fmt: Format, tokenizer: Any) -> ToolSpeech:
        return ToolSpeech.of(fmt, tokenizer, self.tools(), self.calls)

    def introduced(self, problem: Problem, messages: Sequence[Message]) -> Problem:
        return offer(super().introduced(problem, messages), self.tools(), self.calls, self.describe)


class ToolWorld(Environment):
    """Functions answer tool calls. A turn without a call is the last."""

    def __init__(self, functions: Mapping[str, Function], calls_per_turn: int):
        self.functions, self._most = functions, calls_per_turn

    def step(self, said: Action) -> Observation:
        if not said.tool_calls:
            return Observation(done=True)
        results = tuple(self._answer(call, number) for number, call in enumerate(said.tool_calls))
        return Observation("\n".join(results), results=results)

    def _answer(self, call: Mapping[str, Any], number: int) -> str:
        if number >= self._most:
            return f"error: only {self._most} calls are made in one turn"
        return answered(self.functions, call)

    def score(self) -> Outcome:
        return Outcome(None, None, "the grader judges the last turn")


def answered(functions: Mapping[str, Function], call: Mapping[str, Any]) -> str:
    """The result of the function that a call names; an error message if it cannot be called or raises."""
    if "error" in call:
        return f"error: {call['error']}"
    try:
        return str(functions[call["name"]](**call["arguments"]))
    except (WorldGone, ConnectionError, TimeoutError):
        raise
    except Exception as error:  # noqa: BLE001  (what a tool raises is told to the model)
        return f"error: {type(error).__name__}: {error}"


def understanding(speech: ToolSpeech | None, fmt: Format) -> Callable[[str, Finish], Action]:
    """A function that parses a turn's text for the environment: its answer, and its tool calls if there are tools."""

    def understand(text: str, finish: Finish) -> Action:
        answer = fmt.parse(text).answer
        if speech is None:
            return Action(text, finish, answer=answer)
        spoken = speech.read(text)
        calls = tuple(
            {"error": call.fault} if call.fault else {"name": call.name, "arguments": dict(call.arguments)}
            for call in spoken.calls
        )
        return Action(text, finish, spoken.code or "", calls, answer)

    return understand
