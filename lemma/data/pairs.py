"""Rows that compare or judge responses: preference pairs, with the prompt given or shared, and KTO's labelled rows."""

from __future__ import annotations

import re
from typing import Any

from lemma.core.types import Judged, Message, Preference, Problem
from lemma.data.rows import LeftOut, RowError, Values, as_messages, has, last_said, messages, text

TURN = re.compile(r"\n\n(Human|Assistant):")
WANTED = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


def preference(values: Values) -> Preference:
    """`chosen` and `rejected`: responses with a `prompt`, or whole conversations that begin alike."""
    chosen, rejected = _conversation(values, "chosen"), _conversation(values, "rejected")
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise RowError("one of 'chosen' and 'rejected' is text and the other a list of messages")
    if isinstance(chosen, str) and isinstance(rejected, str):
        asked, liked, disliked = _from_text(values, chosen, rejected)
    else:
        assert not isinstance(chosen, str) and not isinstance(rejected, str)
        asked, liked, disliked = _from_messages(values, chosen, rejected)
    if not liked.strip() or not disliked.strip():
        raise RowError("'chosen' or 'rejected' is empty once the prompt they share is taken off")
    return Preference(_problem(asked), liked, disliked)


def judged(values: Values) -> Judged:
    """`prompt`, `completion`, and `label`, which says whether it is wanted."""
    label = str(values.get("label")).lower()
    if label not in WANTED:
        raise RowError(f"the column 'label' holds {values.get('label')!r}, not true or false")
    asked, completion = messages(values, "prompt"), _conversation(values, "completion")
    if not isinstance(completion, str):
        asked, completion = _asked(asked, completion[:-1], "completion"), last_said(completion, "completion")
    return Judged(_problem(asked), completion, WANTED[label])


def _problem(asked: tuple[Message, ...]) -> Problem:
    if not any(one.role == "user" for one in asked):
        raise RowError("the prompt has no message of the user")
    return Problem(asked)


def _conversation(values: Values, name: str) -> str | tuple[Message, ...]:
    value: Any = values.get(name)
    return text(values, name) if isinstance(value, str) or value is None else as_messages(value, name)


Split = tuple[tuple[Message, ...], str, str]


def _from_messages(values: Values, chosen: tuple[Message, ...], rejected: tuple[Message, ...]) -> Split:
    """The last messages are the responses; everything before them belongs to the prompt."""
    liked, disliked = last_said(chosen, "chosen"), last_said(rejected, "rejected")
    earlier = chosen[:-1]
    if earlier != rejected[:-1]:
        raise LeftOut("'chosen' and 'rejected' differ before their last message")
    if earlier and not has(values, "prompt"):
        return earlier, liked, disliked
    return _asked(messages(values, "prompt"), earlier, "chosen"), liked, disliked


def _asked(prompt: tuple[Message, ...], earlier: tuple[Message, ...], name: str) -> tuple[Message, ...]:
    """The prompt of a row and the turns before its response: these repeat the prompt, or continue it."""
    if not earlier:
        return prompt
    contents = [[(one.role, one.content.strip()) for one in said] for said in (prompt, earlier)]
    size = len(prompt)
    if any(contents[1][start : start + size] == contents[0] for start in range(len(earlier) - size + 1)):
        return earlier
    if prompt[-1].role == earlier[0].role or earlier[0].role == "system":
        raise RowError(f"the messages before the last one of '{name}' neither repeat nor continue the column 'prompt'")
    if earlier[-1].role == "assistant":
        raise RowError(f"the column '{name}' ends with two messages of the assistant and no question between them")
    return prompt + earlier


def _from_text(values: Values, chosen: str, rejected: str) -> Split:
    if has(values, "prompt"):
        return messages(values, "prompt"), chosen, rejected
    shared = _common(chosen, rejected)
    turns = [match for match in TURN.finditer(shared) if match[1] == "Assistant"]
    if turns:
        end = turns[-1].end()
        _check_turns(chosen[end:], rejected[end:])
        return _turns(shared[: turns[-1].start()]), chosen[end:].strip(), rejected[end:].strip()
    prompt = shared[: _last_border(shared)].rstrip()
    if not prompt:
        raise RowError("'chosen' and 'rejected' begin differently and there is no column 'prompt'")
    _check_turns(chosen[len(prompt) :], rejected[len(prompt) :])
    return (Message("user", prompt),), chosen[len(prompt) :].lstrip(), rejected[len(prompt) :].lstrip()


def _check_turns(*responses: str) -> None:
    """A response is one turn; if another follows, the conversations diverged before their last turn."""
    if any(TURN.search(response) for response in responses):
        raise LeftOut("'chosen' and 'rejected' differ before their last turn")


def _common(one: str, other: str) -> str:
    """The common prefix of two texts."""
    pairs = enumerate(zip(one, other, strict=False))
    return one[: next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))]


def _last_border(shared: str) -> int:
    """Where the shared prompt of two texts may end: never inside a word that both responses happen to begin with."""
    return max((match.end() for match in re.finditer(r"\s", shared)), default=0)


def _turns(conversation: str) -> tuple[Message, ...]:
    r"""`\n\nHuman: ... \n\nAssistant: ...` as messages."""
    pieces = TURN.split("\n\n" + conversation.lstrip("\n"))
    said = zip(pieces[1::2], pieces[2::2], strict=True)
    roles = {"Human": "user", "Assistant": "assistant"}
    turns = tuple(Message(roles[role], content.strip()) for role, content in said)
    if not turns or turns[-1].role != "user":
        raise RowError("the conversation that 'chosen' and 'rejected' share does not end with a question")
    return turns
