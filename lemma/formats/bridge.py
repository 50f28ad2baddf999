"""The bridge between two turns, in ids: from the end of what the policy said to where it speaks next.

History is never re-rendered. The chat template renders a short conversation with placeholders, and what it writes after
the first placeholder is the bridge. The replies inside it are encoded so that special tokens in them are plain text.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lemma.core.errors import UserError
from lemma.core.types import Message, Problem
from lemma.formats.encode import encode_continuation, encode_text, puts_space_in_front
from lemma.formats.format import Format
from lemma.formats.tool_prompt import ToolSpeech

SAID, HEARD = "THE\u2063POLICY\u2063SAID", "THE\u2063REPLY\u2063{}\u2063WAS"
# Some templates require the name and id of the call that a tool answers, and an id of exactly this length.
CALL = {"name": "tool", "tool_call_id": "call00000"}
QUOTED = 'a\n"b"'


@dataclass(frozen=True)
class Frame:
    """The ids around some replies: one piece more than there are replies. `quoted`: which of them the template writes
    as JSON text."""

    pieces: tuple[tuple[int, ...], ...]
    quoted: tuple[bool, ...]


@dataclass(frozen=True)
class Bridge:
    """The ids around replies, as one format and tokenizer write them."""

    fmt: Format
    tokenizer: Any
    ends: frozenset[int]
    longest: int
    speech: ToolSpeech | None = None
    _frames: dict[tuple[str, ...], Frame] = field(default_factory=dict, repr=False)
    _shown: dict[str, bool] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls, fmt: Format, tokenizer: Any, ends: Collection[int], longest: int, speech: ToolSpeech | None = None
    ) -> Bridge:
        """From the chat template; if the format has no turns, around a plain line of text."""
        bridge = cls(fmt, tokenizer, frozenset(ends) | {tokenizer.eos_token_id}, longest, speech)
        bridge.frame("user")
        return bridge

    def answer(self, said: np.ndarray, text: str, results: Sequence[str] = ()) -> tuple[np.ndarray, bool]:
        """The ids of a reply: as results of tool calls if the template supports them, else as a user message."""
        if results and self.speech is not None and self.speech.by_template and self.shows("tool"):
            return self.ids(said, results, "tool")
        return self.ids(said, text)

    def ids(
        self, said: np.ndarray, reply: str | Sequence[str], role: str | Sequence[str] = "user"
    ) -> tuple[np.ndarray, bool]:
        """The ids that follow what was said, and whether a reply was truncated.

        Several replies are several messages, of this role or each of its own. The end-of-turn token is part of the
        bridge only if the policy did not sample it.
        """
        replies = [reply] if isinstance(reply, str) else list(reply)
        frame = self.frame(*([role] * len(replies) if isinstance(role, str) else role))
        front, *rest = frame.pieces
        ids = list(self.behind(said, front))
        cut = False
        for text, after, quoted in zip(replies, rest, frame.quoted, strict=True):
            middle = self.plain(json.dumps(text, ensure_ascii=False)[1:-1] if quoted else text)
            most = max(self.longest // len(replies), 1)
            if len(middle) > most:
                cut, half = True, most // 2
                middle = [*middle[: most - half], *middle[len(middle) - half :]]
            ids += [*middle, *after]
        return np.asarray(ids, dtype=np.int32), cut

    def anew(self, text: str) -> np.ndarray:
        """The ids of a conversation that starts over with this one message, in which special tokens are plain text."""
        before, _, after = self.fmt.prompt(Problem((Message("user", SAID),)), self.tokenizer).partition(SAID)
        ids = [*encode_text(before, self.tokenizer), *self.plain(text)]
        return np.asarray([*ids, *encode_continuation(after, "\n", self.tokenizer)], dtype=np.int32)

    def frame(self, *roles: str) -> Frame:
        """What the template writes around messages of these roles; cached."""
        if roles not in self._frames:
            self._frames[roles] = self._frame(roles)
        return self._frames[roles]

    def shows(self, role: str) -> bool:
        """Whether the template shows the content of messages of this role."""
        if role not in self._shown:
            try:
                self._shown[role] = self._after_placeholder([role], [HEARD]) is not None
            except UserError:
                self._shown[role] = False
        return self._shown[role]

    def _frame(self, roles: Sequence[str]) -> Frame:
        marks = [HEARD.format(number) for number in range(len(roles))]
        behind = self._after_placeholder(roles, marks)
        if behind is None:
            pieces = ["\n"] * (len(roles) + 1)
        else:
            pieces = []
            for mark in marks:
                piece, _, behind = behind.partition(mark)
                pieces.append(piece)
            pieces.append(behind)
        mark = json.dumps(QUOTED)[1:-1]
        quoted = {role: mark in (self._after_placeholder([role], [QUOTED]) or "") for role in set(roles)}
        encoded = [encode_continuation(piece, "\n", self.tokenizer) for piece in pieces]
        return Frame(tuple(map(tuple, encoded)), tuple(quoted[role] for role in roles))

    def _after_placeholder(self, roles: Sequence[str], contents: Sequence[str]) -> str | None:
        """What the template writes between a turn and the next; None if it leaves out one of the contents.

        Tried with tools and without: templates for tools need some, all others do without.
        """
        turns = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": SAID},
            *(
                {"role": role, "content": content, **(CALL if role == "tool" else {})}
                for role, content in zip(roles, contents, strict=True)
            ),
        ]
        tools = [tool.as_dict() for tool in self.speech.tools] if self.speech is not None else []
        ways: list[Any] = [None] if not tools else [tools, None] if "tool" in roles else [None, tools]
        refusals: list[UserError] = []
        for way in ways:
            try:
                text = self.fmt.written(turns, self.tokenizer, tools=way)
            except UserError as error:
                refusals.append(error)
                continue
            _, said, behind = text.rpartition(SAID)
            if said and (list(contents) == [QUOTED] or all(content in behind for content in contents)):
                return behind
        if len(refusals) == len(ways):
            raise refusals[-1]
        return None

    def behind(self, said: np.ndarray, front: Sequence[int]) -> Sequence[int]:
        """What follows a turn, without the end token that was already sampled, and without tags or spaces before that
        end."""
        if not len(said) or int(said[-1]) not in self.ends:
            return front
        place = next((number for number, token in enumerate(front) if token in self.ends), None)
        if place is None or self.tokenizer.decode(front[:place], skip_special_tokens=True).strip():
            return front
        return front[place + 1 :]

    def plain(self, text: str) -> list[int]:
        """The ids of a text in which special tokens are treated as plain text."""
        if not text:
            return []
        text = text.encode("utf-8", "replace").decode("utf-8")
        if not puts_space_in_front(self.tokenizer):
            return self._split(text)
        known, whole = self._split("\n"), self._split("\n" + text)
        return whole[len(known) :] if whole[: len(known)] == known else self._split(text)

    def _split(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))
