"""Orders and answers from what `dataclasses.asdict` and JSON have made of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lemma.core.types import Message, Outcome, Problem
from lemma.environments.environment import Action, Observation
from lemma.environments.room import Opening, WorldAnswer, WorldOrder


def order_from(row: Mapping[str, Any]) -> WorldOrder:
    said, opening = row["said"], row["opening"]
    if opening is not None:
        turns = tuple(map(_action, opening["said"]))
        opening = Opening(problem_from(opening["problem"]), opening["seed"], turns)
    return WorldOrder(row["world"], row["call"], None if said is None else _action(said), opening)


def answer_from(row: Mapping[str, Any]) -> WorldAnswer:
    value = row["value"]
    if isinstance(value, list):
        value = tuple(_reply(one) if row["kind"] == "replayed" else Message(**one) for one in value)
    elif isinstance(value, dict):
        value = _reply(value) if "text" in value else Outcome(**value)
    return WorldAnswer(row["world"], row["kind"], value, row["seconds"])


def problem_from(row: Mapping[str, Any]) -> Problem:
    messages = tuple(Message(**one) for one in row["messages"])
    tuples = {name: tuple(row[name]) for name in ("golds", "choices", "traces")}
    return Problem(**{**row, **tuples, "messages": messages})


def _reply(row: Mapping[str, Any]) -> Observation:
    return Observation(**{**row, "results": tuple(row["results"])})


def _action(row: Mapping[str, Any]) -> Action:
    return Action(**{**row, "tool_calls": tuple(row["tool_calls"])})
