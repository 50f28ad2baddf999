"""Reward functions as veRL and OpenRLHF take them, called as they call them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from lemma.core.async_calls import result_of
from lemma.core.errors import UserError
from lemma.rewards.custom import EachFunction, FunctionReward, load_function, number_of, parameters_of
from lemma.rewards.reward import WrongReturn
from lemma.rewards.reward_input import RewardInput
from lemma.rewards.trl_function import listed

VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
OPENRLHF = ("queries", "prompts", "labels")


class VerlFunction(EachFunction):
    """veRL's `compute_score(data_source, solution_str, ground_truth, extra_info)`, which returns a number, or a mapping
    with `score`."""

    name: Literal["verl"] = "verl"
    """Which reward."""

    def check(self) -> None:
        _check_call(self, VERL)

    def call(self, item: RewardInput) -> Any:
        problem = item.problem
        values = (problem.source, item.completion, problem.gold, problem.extra.get("extra_info"))
        function = load_function(self.function)
        return function(**_taken(function, dict(zip(VERL, values, strict=True))), **self.options)

    def value(self, found: Any) -> float | None:
        return number_of(_inside(found, "score"))


class OpenRlhfFunction(FunctionReward):
    """OpenRLHF's `reward_func(queries, prompts, labels)`, which returns a list or tensor, or a mapping with `rewards`.
    A query is the question followed by the completion."""

    name: Literal["openrlhf"] = "openrlhf"
    """Which reward."""

    def check(self) -> None:
        _check_call(self, OPENRLHF)

    def score_all(self, items: Sequence[RewardInput]) -> list[float | None]:
        if not items:
            return []
        prompts = [item.problem.question for item in items]
        queries = [prompt + item.completion for prompt, item in zip(prompts, items, strict=True)]
        values = (queries, prompts, [item.problem.gold for item in items])
        function = load_function(self.function)
        found = function(**_taken(function, dict(zip(OPENRLHF, values, strict=True))), **self.options)
        ended = result_of(found, self.seconds * len(items))
        return [number_of(value) for value in listed(_inside(ended, "rewards"), len(items))]


def owner_of(function: Any) -> str | None:
    """Whose signature a function has, by its argument names: `verl`, `openrlhf`, or neither."""
    taken = set(parameters_of(function)) if callable(function) else set()
    if {"solution_str", "ground_truth"} <= taken:
        return "verl"
    return "openrlhf" if {"queries", "prompts"} <= taken else None


def _taken(function: Any, known: Mapping[str, Any]) -> dict[str, Any]:
    parameters = parameters_of(function)
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return dict(known)
    return {name: value for name, value in known.items() if name in parameters}


def _check_call(reward: FunctionReward, names: Sequence[str]) -> None:
    function = load_function(reward.function)
    try:
        inspect.signature(function).bind(**_taken(function, dict.fromkeys(names)), **reward.options)
    except (TypeError, ValueError) as error:
        file, line = reward.place
        raise UserError(
            f"reward '{reward.label}' cannot be called with {', '.join(names)} and its options: {error}",
            file=file,
            line=line,
            fix="give what it lacks under `options`",
        ) from error


def _inside(found: Any, key: str) -> Any:
    if not isinstance(found, Mapping):
        return found
    if key not in found:
        raise WrongReturn(f"returned a mapping without '{key}'", f"return a number, or a mapping with '{key}'")
    return found[key]
