"""What stands between two turns: from the end of what the policy said to where it speaks next, in ids.

History is never rendered again. The chat template writes a short conversation around marks, and what it puts behind the
first mark is the bridge. The replies inside it are encoded so that no special token in them is alive.
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
# Some templates want the name and the number of the call that a tool answers, and a number of just this length.
CALL = {"name": "tool", "tool_call_id": "call00000"}
QUOTED = 'a\n"b"'


@dataclass(frozen=True)
class Frame:
    """The ids around some replies: one piece more than replies. `quoted`: the template writes them as JSON text."""

    pieces: tuple[tuple[int, ...], ...]
    quoted: bool = False


@dataclass(frozen=True)
class Bridge:
    """The ids around replies, as one format and tokenizer write them."""

    fmt: Format
    tokenizer: Any
    ends: frozenset[int]
    longest: int
    speech: ToolSpeech | None = None
    _frames: dict[tuple[str, int], Frame] = field(default_factory=dict, repr=False)
    _shown: dict[str, bool] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls, fmt: Format, tokenizer: Any, ends: Collection[int], longest: int, speech: ToolSpeech | None = None
    ) -> Bridge:
        """From the chat template; around a plain line of text where the format has no turns."""
        bridge = cls(fmt, tokenizer, frozenset(ends) | {tokenizer.eos_token_id}, longest, speech)
        bridge.frame("user", 1)
        return bridge

    def answer(self, said: np.ndarray, text: str, results: Sequence[str] = ()) -> tuple[np.ndarray, bool]:
        """The ids of a reply: results of tool calls as such where the template teaches that, else a user's message."""
        if results and self.speech is not None and self.speech.by_template and self.shows("tool"):
            return self.ids(said, results, "tool")
        return self.ids(said, text)

    def ids(self, said: np.ndarray, reply: str | Sequence[str], role: str = "user") -> tuple[np.ndarray, bool]:
        """The ids that follow what was said, and whether a reply was cut.

        Several replies are several messages of this role. The token that ends a turn is part of the bridge only where
        the policy did not sample it.
        """
        replies = [reply] if isinstance(reply, str) else list(reply)
        frame = self.frame(role, len(replies))
        front, *rest = frame.pieces
        ids = list(self.behind(said, front))
        cut = False
        for text, after in zip(replies, rest, strict=True):
            middle = self.plain(json.dumps(text, ensure_ascii=False)[1:-1] if frame.quoted else text)
            most = max(self.longest // len(replies), 1)
            if len(middle) > most:
                cut, half = True, most // 2
                middle = [*middle[: most - half], *middle[len(middle) - half :]]
            ids += [*middle, *after]
        return np.asarray(ids, dtype=np.int32), cut

    def anew(self, text: str) -> np.ndarray:
        """The ids of a conversation that begins again with this one message, whose special tokens are only spelled."""
        before, _, after = self.fmt.prompt(Problem((Message("user", SAID),)), self.tokenizer).partition(SAID)
        ids = [*encode_text(before, self.tokenizer), *self.plain(text)]
        return np.asarray([*ids, *encode_continuation(after, "\n", self.tokenizer)], dtype=np.int32)

    def frame(self, role: str, count: int) -> Frame:
        """What the template writes around that many messages of a role; made once."""
        if (role, count) not in self._frames:
            self._frames[role, count] = self._frame(role, count)
        return self._frames[role, count]

    def shows(self, role: str) -> bool:
        """Whether the template shows what a message of this role says."""
        if role not in self._shown:
            try:
                self._shown[role] = self._behind_mark(role, [HEARD]) is not None
            except UserError:
                self._shown[role] = False
        return self._shown[role]

    def _frame(self, role: str, count: int) -> Frame:
        marks = [HEARD.format(number) for number in range(count)]
        behind = self._behind_mark(role, marks)
        if behind is None:
            pieces = ["\n"] * (count + 1)
        else:
            pieces = []
            for mark in marks:
                piece, _, behind = behind.partition(mark)
                pieces.append(piece)
            pieces.append(behind)
        quoted = json.dumps(QUOTED)[1:-1] in (self._behind_mark(role, [QUOTED]) or "")
        encoded = [encode_continuation(piece, "\n", self.tokenizer) for piece in pieces]
        return Frame(tuple(map(tuple, encoded)), quoted)

    def _behind_mark(self, role: str, contents: Sequence[str]) -> str | None:
        """What the template writes behind a turn and up to the next; None where it leaves one of the contents out.

        Templates for tools want some; all others are asked without.
        """
        more = CALL if role == "tool" else {}
        turns = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": SAID},
            *({"role": role, "content": content, **more} for content in contents),
        ]
        tools = [tool.as_dict() for tool in self.speech.tools] if self.speech is not None else []
        ways: list[Any] = [None] if not tools else [None, tools] if role == "user" else [tools, None]
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
        """What follows a turn, without the end that was sampled already, and marks or blanks in front of that end."""
        if not len(said) or int(said[-1]) not in self.ends:
            return front
        place = next((number for number, token in enumerate(front) if token in self.ends), None)
        if place is None or self.tokenizer.decode(front[:place], skip_special_tokens=True).strip():
            return front
        return front[place + 1 :]

    def plain(self, text: str) -> list[int]:
        """The ids of a text in which special tokens are only spelled, not meant."""
        if not text:
            return []
        text = text.encode("utf-8", "replace").decode("utf-8")
        if not puts_space_in_front(self.tokenizer):
            return self._split(text)
        known, whole = self._split("\n"), self._split("\n" + text)
        return whole[len(known) :] if whole[: len(known)] == known else self._split(text)

    def _split(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))
