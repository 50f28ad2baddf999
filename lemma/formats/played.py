"""Conversations encoded as an environment plays them: history is never re-rendered.

The assistant's turns are encoded one by one, as they would be sampled, and what lies between them by the same bridge
that episodes use. So a multi-turn demonstration is token for token what an episode would be, even if the chat template
would render finished turns differently.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np

from lemma.core.errors import UserError
from lemma.core.types import Demonstration, Message, Problem, Trajectory
from lemma.formats.bridge import Bridge
from lemma.formats.encode import encode_demonstration, encode_prompt
from lemma.formats.format import Format, about
from lemma.formats.turns import Turns, each_turn, encode_turns

NO_LIMIT = 1 << 30


def first_asked(item: Demonstration | Problem) -> Problem:
    """The problem before the first assistant turn of a multi-turn demonstration."""
    if isinstance(item, Problem):
        return item
    turns = each_turn(item)
    return item.problem if len(turns) == 1 else replace(turns[0].problem, id="")


def said_ids(fmt: Format, item: Demonstration, tokenizer: Any) -> list[np.ndarray]:
    """The ids of each assistant turn, including its end-of-turn token."""
    encoded = [encode_demonstration(fmt, one, tokenizer) for one in each_turn(item)]
    return [one.ids_T[one.loss_mask_T] for one in encoded]


def encode_learnt(
    fmt: Format,
    item: Demonstration,
    tokenizer: Any,
    turns: Turns | Literal["played"],
    learn: Literal["response", "all"],
) -> list[Trajectory]:
    """A demonstration with these turns trained on, or with all of its tokens: one sequence, or several if necessary."""
    if turns != "played":
        whole = learn == "all"
        return (
            [encode_demonstration(fmt, item, tokenizer, "all")] if whole else encode_turns(fmt, item, tokenizer, turns)
        )
    played = encode_played(fmt, item, tokenizer)
    if learn == "all":
        played.loss_mask_T = np.arange(len(played)) > 0
    return [played]


def encode_played(fmt: Format, item: Demonstration, tokenizer: Any) -> Trajectory:
    """One sequence, trained on every assistant turn."""
    turns = each_turn(item)
    if len(turns) == 1:
        return encode_demonstration(fmt, item, tokenizer)
    bridge = Bridge.of(fmt, tokenizer, (), NO_LIMIT)
    ids: list[np.ndarray] = [encode_prompt(fmt, turns[0].problem, tokenizer)]
    chosen = [np.zeros(len(ids[0]), dtype=bool)]
    for number, said in enumerate(said_ids(fmt, item, tokenizer)):
        if number:
            heard = _heard(turns[number - 1], turns[number])
            between, _ = bridge.ids(ids[-1], [one.content for one in heard], [one.role for one in heard])
            ids.append(between.astype(np.int64))
            chosen.append(np.zeros(len(ids[-1]), dtype=bool))
        ids.append(said)
        chosen.append(np.ones(len(said), dtype=bool))
    loss_mask_T = np.concatenate(chosen)
    loss_mask_T[0] = False
    return Trajectory(np.concatenate(ids), loss_mask_T, origin="teacher", finish="given", problem_id=item.problem.id)


def _heard(before: Demonstration, after: Demonstration) -> tuple[Message, ...]:
    """The messages between two assistant turns."""
    heard = after.problem.messages[len(before.problem.messages) + 1 :]
    if not heard:
        raise UserError(
            f"the assistant speaks twice in a row in {about(after.problem)}",
            fix="put what it hears between its turns into the row, or write `turns: all`",
        )
    return heard
