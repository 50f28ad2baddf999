"""Conversations trained on every assistant turn, not only the last.

A turn is trained on after exactly the text that the model would see when it generates it. If a chat template only ever
appends, that is one sequence with several trained spans. If it renders finished turns differently (templates of
thinking models remove their reasoning), each turn becomes its own sequence.

Or a conversation is encoded as an environment plays it: the assistant's turns one by one, as they would be sampled, and
what lies between them by the same bridge that episodes use, with a history that is never re-rendered. So a multi-turn
demonstration is token for token what an episode would be.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np

from lemma.core.errors import UserError
from lemma.core.types import Demonstration, Message, Problem, Trajectory
from lemma.formats.bridge import Bridge
from lemma.formats.encode import (
    check_beginning,
    encode_continuation,
    encode_demonstration,
    encode_prompt,
    encode_text,
    end_of,
    target_text,
)
from lemma.formats.format import Format, about

Turns = Literal["all", "last"]
NO_LIMIT = 1 << 30


def encode_turns(fmt: Format, item: Demonstration, tokenizer: Any, turns: Turns = "all") -> list[Trajectory]:
    """The demonstration, trained on all of its turns or on its last: one trajectory, or several if necessary."""
    earlier = item.earlier_turns if turns == "all" else []
    if not earlier:
        return [encode_demonstration(fmt, item, tokenizer)]
    spans = _spans(fmt, item, earlier, tokenizer)
    if spans is not None:
        return [_encode_whole(fmt, item, spans, tokenizer)]
    return [encode_demonstration(fmt, one, tokenizer) for one in each_turn(item)]


def each_turn(item: Demonstration) -> list[Demonstration]:
    """Every assistant turn that may be trained on, after what was said before it; the last is the item itself."""
    said = item.problem.messages
    cut = [
        replace(
            item,
            problem=replace(item.problem, messages=said[:place]),
            response=said[place].content,
            more=said[place].more,
        )
        for place in item.earlier_turns
    ]
    return [*cut, item]


def _spans(fmt: Format, item: Demonstration, earlier: list[int], tokenizer: Any) -> list[tuple[int, int]] | None:
    """Spans of the earlier turns in the text of the prompt, including their end tokens; None if they are not found."""
    problem = item.problem
    tools, whole = problem.extra.get("tools"), fmt.prompt(problem, tokenizer)
    turns = fmt.messages(problem)
    shift = len(turns) - sum(message.role != "system" for message in problem.messages)
    spans = []
    for place in earlier:
        number = shift + sum(message.role != "system" for message in problem.messages[:place])
        before, after = (
            fmt.written(turns[:end], tokenizer, tools=tools, is_open=end == number, about=about(problem))
            for end in (number, number + 1)
        )
        said = after[len(before) :].rstrip()
        if not said or not after.startswith(before) or not whole.startswith(before + said):
            return None
        spans.append((len(before), len(before) + len(said)))
    return spans


def _encode_whole(fmt: Format, item: Demonstration, spans: list[tuple[int, int]], tokenizer: Any) -> Trajectory:
    """One sequence: the prompt with its trained spans, the response, and the end-of-sequence token."""
    text = fmt.prompt(item.problem, tokenizer)
    ids: list[int] = []
    chosen: list[bool] = []
    done = 0
    for start, end in (*spans, (len(text), len(text))):
        for piece, learnt in ((text[done:start], False), (text[start:end], True)):
            new = encode_continuation(piece, text[:done], tokenizer) if ids else encode_text(piece, tokenizer)
            ids += new
            chosen += [learnt] * len(new)
            done += len(piece)
    check_beginning(ids, tokenizer)
    response = encode_continuation(target_text(fmt, item, tokenizer, text), text, tokenizer)
    ids_T = np.asarray([*ids, *response, end_of(tokenizer)], dtype=np.int64)
    loss_mask_T = np.asarray([*chosen, *[True] * (len(response) + 1)])
    loss_mask_T[0] = False
    return Trajectory(
        ids_T=ids_T, loss_mask_T=loss_mask_T, origin="teacher", finish="given", problem_id=item.problem.id
    )


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
