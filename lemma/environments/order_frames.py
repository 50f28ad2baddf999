"""Orders and answers as messages between processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from lemma.core.types import Message, Outcome, Problem
from lemma.environments.environment import Reply, Utterance
from lemma.environments.room import Opening, WorldAnswer, WorldOrder


def order_to_wire(order: WorldOrder) -> dict[str, Any]:
    row: dict[str, Any] = {"world": order.world, "call": order.call}
    if order.said is not None:
        row["said"] = asdict(order.said)
    if order.opening is not None:
        row["opening"] = {
            "problem": asdict(order.opening.problem),
            "seed": order.opening.seed,
            "said": [asdict(said) for said in order.opening.said],
        }
    return row


def order_from_wire(row: Mapping[str, Any]) -> WorldOrder:
    said, opening = row.get("said"), row.get("opening")
    return WorldOrder(
        row["world"],
        row["call"],
        None if said is None else _utterance(said),
        None
        if opening is None
        else Opening(problem_from(opening["problem"]), opening["seed"], tuple(map(_utterance, opening["said"]))),
    )


def answer_to_wire(answer: WorldAnswer) -> dict[str, Any]:
    value = answer.value
    if isinstance(value, tuple):
        value = [_part(one) for one in value]
    elif isinstance(value, Reply | Outcome):
        value = _part(value)
    return {"world": answer.world, "kind": answer.kind, "value": value, "seconds": answer.seconds}


def answer_from_wire(row: Mapping[str, Any]) -> WorldAnswer:
    value = row["value"]
    if isinstance(value, list):
        value = tuple(_of_part(one) for one in value)
    elif isinstance(value, dict):
        value = _of_part(value)
    return WorldAnswer(row["world"], row["kind"], value, row["seconds"])


def _part(value: Reply | Outcome | Message) -> dict[str, Any]:
    if isinstance(value, Message):
        return {"is": "message", "role": value.role, "content": value.content, "more": dict(value.more)}
    return {"is": "reply" if isinstance(value, Reply) else "outcome", **asdict(value)}


def _of_part(row: Mapping[str, Any]) -> Reply | Outcome | Message:
    rest = {name: tuple(value) if name == "results" else value for name, value in row.items() if name != "is"}
    kind: Any = {"message": Message, "reply": Reply, "outcome": Outcome}[row["is"]]
    return kind(**rest)


def _utterance(row: Mapping[str, Any]) -> Utterance:
    return Utterance(row["text"], row["finish"], row["code"], tuple(row["tool_calls"]), row["answer"])


def problem_from(row: Mapping[str, Any]) -> Problem:
    messages = tuple(Message(one["role"], one["content"], one["more"]) for one in row["messages"])
    tuples = {name: tuple(row[name]) for name in ("golds", "choices", "traces")}
    return Problem(**{**row, **tuples, "messages": messages})
