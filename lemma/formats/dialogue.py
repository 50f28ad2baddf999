"""Conversations from chat clients, in ids: the whole prompt, or what follows a turn whose ids are known.

A special token in a message of anyone but the assistant is treated as plain text.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from lemma.core.errors import UserError
from lemma.formats.bridge import Bridge
from lemma.formats.encode import encode_continuation, encode_text
from lemma.formats.format import Format
from lemma.formats.tool_prompt import ToolSpeech

SAID = "THE\u2063POLICY\u2063SAID"
ROLES = ("system", "user", "assistant", "tool")

Turns = Sequence[Mapping[str, Any]]


class Dialogue:
    """Messages with role, content and perhaps tool calls, as one format and tokenizer render them.

    Any thread may use it, one at a time. Nothing else should use its tokenizer meanwhile: the setting to split special
    tokens is global to the tokenizer.
    """

    def __init__(self, fmt: Format, tokenizer: Any, ends: Collection[int]):
        self.fmt, self.tokenizer = fmt, tokenizer
        self._lock = threading.RLock()
        self.style = ToolSpeech.of(fmt, tokenizer, ()).style
        self.ends = frozenset(ends) | {tokenizer.eos_token_id}
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._special = tuple(
            {str(token.content) for token in added.values() if token.special} | set(tokenizer.all_special_tokens)
        )
        self._bridge = Bridge(fmt, self.tokenizer, self.ends, 0)
        self._shows_tools: bool | None = None

    def prompt(self, messages: Turns, tools: Sequence[Any] = (), *, continues: bool = False) -> np.ndarray:
        """The whole prompt, in ids; if `continues`, it ends with the text of the last message, which the assistant has
        begun, unless that is empty."""
        with self._lock:
            if continues and not (messages[-1].get("tool_calls") or (messages[-1].get("content") or "").strip()):
                messages, continues = messages[:-1], False
            turns = self._turns(messages)
            self._check_roles(turns)
            marked, contents = self._marked(turns)
            if continues:
                text = self._unfinished(marked, tools)
            else:
                text = self.fmt.written(marked, self.tokenizer, tools=list(tools) or None)
            return np.asarray(self._encode(text, contents), dtype=np.int64)

    def encode(self, text: str) -> np.ndarray:
        """The ids of a text in which special tokens are recognised."""
        with self._lock:
            return np.asarray(encode_text(text, self.tokenizer), dtype=np.int64)

    def begin(self, text: str) -> np.ndarray:
        """The ids of a text that begins a prompt: after whatever the tokenizer puts in front of a text."""
        with self._lock:
            return np.asarray(self.tokenizer.encode(text), dtype=np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids, special tokens included."""
        with self._lock:
            return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of each id by itself."""
        return [self.decode([token]) for token in ids]

    def after(self, said: np.ndarray, messages: Turns, tools: Sequence[Any] = ()) -> np.ndarray | None:
        """What the model reads between a turn that it sampled as `said` and its next turn, when `messages` follow.

        None if the template does not tell: it refuses these messages after a plain turn.
        """
        turns = [_as_template_takes(message) for message in messages]
        if not turns or any(turn["role"] == "assistant" for turn in turns):
            return None
        with self._lock:
            self._check_roles(turns)
            marked, contents = self._marked(turns)
            front = [{"role": "user", "content": "?"}, {"role": "assistant", "content": SAID}]
            try:
                text = self.fmt.written([*front, *marked], self.tokenizer, tools=list(tools) or None)
            except UserError:
                return None
            before, mark, behind = text.rpartition(SAID)
            if not mark:
                return None
            ids = self._bridge.behind(said, self._encode(behind, contents, before + mark))
            return np.asarray(ids, dtype=np.int64)

    def _unfinished(self, turns: Turns, tools: Sequence[Any]) -> str:
        """The conversation without what the template writes after the last message. Where it trims messages, a space at
        the end is left out too, as by transformers' `continue_final_message`."""
        *rest, last = turns
        if last.get("tool_calls"):
            raise UserError("the last message calls tools and cannot be continued", fix="send the results after it")
        begun = {**last, "content": f"{last['content']}{SAID} "}
        text = self.fmt.written([*rest, begun], self.tokenizer, tools=list(tools) or None, is_open=False)
        before, mark, behind = text.rpartition(SAID)
        before = before if behind.startswith(" ") else before.rstrip()
        if not mark or not before.rstrip().endswith(last["content"].strip()):
            raise UserError(
                "the chat template changes the assistant's last message, so it cannot be continued",
                fix="end the messages with the role 'user'",
            )
        return before

    def _turns(self, messages: Turns) -> list[dict[str, Any]]:
        """The turns, under the format's own system message if the conversation has none that the format accepts."""
        turns = [_as_template_takes(message) for message in messages]
        theirs = turns[0]["content"] if turns and turns[0]["role"] == "system" else None
        rest = turns if theirs is None else turns[1:]
        if not any(turn["role"] in ("user", "tool") for turn in rest):
            raise UserError("the conversation asks nothing", fix="give it a message with the role 'user'")
        takes = self.fmt.takes_system and self.fmt.system is None
        system = (theirs if takes else None) or self.fmt.own_system
        for turn in rest:
            if turn["role"] == "assistant" and not turn["content"].startswith(self.fmt.opening):
                turn["content"] = self.fmt.opening + turn["content"]
        return [{"role": "system", "content": system}, *rest] if system else rest

    def _check_roles(self, turns: Turns) -> None:
        """Refuse tool messages that the template would silently leave out."""
        if not any(turn["role"] == "tool" for turn in turns):
            return
        if self._shows_tools is None:
            call = {"type": "function", "id": "call00000", "function": {"name": "f", "arguments": {}}}
            probe: list[dict[str, Any]] = [
                {"role": "user", "content": "?"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": SAID, "name": "f", "tool_call_id": "call00000"},
            ]
            try:
                self._shows_tools = SAID in self.fmt.written(probe, self.tokenizer)
            except UserError:
                self._shows_tools = True  # it raises an error, and may accept what is really sent
        if not self._shows_tools:
            raise UserError(
                "the chat template leaves out messages of the role 'tool'", fix="send them with the role 'user'"
            )

    def _marked(self, turns: Turns) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """The turns with placeholders for contents that contain special tokens, and what the placeholders stand for."""
        marked, contents = [], {}
        for number, turn in enumerate(turns):
            content = turn["content"]
            if turn["role"] != "assistant" and any(token in content for token in self._special):
                mark = f"MESSAGE\u2063{number}\u2063"
                contents[mark] = self._quoted(content, turn["role"])
                turn = {**turn, "content": mark}
            marked.append(dict(turn))
        return marked, contents

    def _quoted(self, content: str, role: str) -> str:
        """The content as the template writes it: some write tool results as JSON."""
        try:
            is_quoted = role == "tool" and self._bridge.frame(role).quoted[0]
        except UserError:
            is_quoted = False
        return json.dumps(content, ensure_ascii=False)[1:-1] if is_quoted else content

    def _encode(self, text: str, contents: Mapping[str, str], before: str = "") -> list[int]:
        """The ids of a text that follows another, with each placeholder replaced by its content as plain text."""
        if not contents:
            return encode_continuation(text, before, self.tokenizer) if before else encode_text(text, self.tokenizer)
        ids: list[int] = []
        for mark, content in contents.items():
            if mark not in text:
                continue
            piece, _, text = text.partition(mark)
            ids += encode_text(piece, self.tokenizer)
            ids += self._bridge.plain(content)
        return [*ids, *encode_text(text, self.tokenizer)]


def _as_template_takes(message: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of tool calls as objects: clients send them as JSON text, and templates write them as JSON."""
    turn = {key: value for key, value in message.items() if value is not None}
    turn["content"] = message.get("content") or ""
    calls = [dict(call) for call in message.get("tool_calls") or ()]
    for call in calls:
        call["function"] = dict(call["function"])
        try:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        except (ValueError, TypeError):
            continue
    return turn | ({"tool_calls": calls} if calls else {})
