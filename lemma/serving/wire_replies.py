"""Responses in the format of OpenAI's API: whole answers, and the chunks of a stream."""

from __future__ import annotations

import time
import uuid
from typing import Any

from lemma.formats.dialogue import Dialogue
from lemma.serving.exchange import Exchange, NewText, WireChoice
from lemma.serving.text_stream import UNKNOWN

OBJECTS = {
    ("chat", False): "chat.completion",
    ("chat", True): "chat.completion.chunk",
    ("text", False): "text_completion",
    ("text", True): "text_completion",
}


class ReplyWriter:
    """Writes one exchange as JSON objects, all with the same id and time."""

    def __init__(self, exchange: Exchange, dialogue: Dialogue, model: str):
        self._exchange, self._asked, self._dialogue = exchange, exchange.asked, dialogue
        prefix = "chatcmpl" if self._asked.kind == "chat" else "cmpl"
        self._head = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": OBJECTS[self._asked.kind, self._asked.stream],
            "created": int(time.time()),
            "model": model,
        }
        self._begun: set[int] = set()

    def whole(self) -> dict[str, Any]:
        choices = [self._choice(choice) for _, choice in sorted(self._exchange.choices.items())]
        return {**self._head, "choices": choices, "usage": self._usage()}

    def pieces(self, news: NewText | WireChoice) -> list[dict[str, Any]]:
        """The stream's chunks for new text, or for the end of a sample."""
        if isinstance(news, NewText):
            return [self._piece(news.index, news.text)]
        pieces = []
        if self._asked.tools:
            # With tools nothing was streamed yet.
            pieces += [self._piece(news.index, news.content)] if news.content else []
            pieces += [self._piece(news.index, None, calls=news.calls)] if news.calls else []
        return [*pieces, self._last(news)]

    def usage_piece(self) -> dict[str, Any]:
        return {**self._head, "choices": [], "usage": self._usage()}

    def _usage(self) -> dict[str, int]:
        prompt, said = self._exchange.prompt_tokens, self._exchange.completion_tokens
        return {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said}

    def _choice(self, choice: WireChoice) -> dict[str, Any]:
        row: dict[str, Any] = {"index": choice.index, "finish_reason": choice.finish}
        row["logprobs"] = self._logprobs(choice) if self._asked.logprobs else None
        if self._asked.kind == "text":
            return row | {"text": choice.content} | self._ids(choice)
        message: dict[str, Any] = {"role": "assistant", "content": choice.content, "refusal": None}
        if choice.calls:
            message |= {"content": choice.content or None, "tool_calls": choice.calls}
        return row | {"message": message} | self._ids(choice)

    def _piece(self, index: int, text: str | None, calls: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        row: dict[str, Any] = {"index": index, "finish_reason": None, "logprobs": None}
        if self._asked.kind == "text":
            return {**self._head, "choices": [row | {"text": text or ""}]}
        delta: dict[str, Any] = {} if index in self._begun else {"role": "assistant"}
        self._begun.add(index)
        if text is not None:
            delta["content"] = text
        if calls:
            delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls)]
        return {**self._head, "choices": [row | {"delta": delta}]}

    def _last(self, choice: WireChoice) -> dict[str, Any]:
        """The end of a sample, with the log-probabilities of all its tokens."""
        piece = self._piece(choice.index, None if self._asked.kind == "chat" else "")
        row = piece["choices"][0]
        row["finish_reason"] = choice.finish
        row["logprobs"] = self._logprobs(choice) if self._asked.logprobs else None
        row |= self._ids(choice)
        return piece

    def _ids(self, choice: WireChoice) -> dict[str, Any]:
        if not self._asked.token_ids:
            return {}
        return {
            "prompt_token_ids": [int(token) for token in choice.prompt],
            "token_ids": choice.completion.ids.tolist(),
        }

    def _logprobs(self, choice: WireChoice) -> dict[str, Any]:
        """For every sampled token, including the one that ended the sample."""
        pieces, logprobs = self._dialogue.pieces(choice.completion.ids.tolist()), choice.completion.logprobs.tolist()
        likeliest = [[(self._dialogue.decode([token]), value) for token, value in row] for row in choice.likeliest]
        if self._asked.kind == "text":
            # Best first; of tokens with the same text the likeliest counts, which the second half sets last.
            top = [dict([*row, *reversed(row)]) for row in likeliest] if self._asked.likeliest else None
            return {"tokens": pieces, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": None}
        rows = likeliest or [[] for _ in pieces]
        content = [
            _told(piece, value) | {"top_logprobs": [_told(*one) for one in row]}
            for piece, value, row in zip(pieces, logprobs, rows, strict=True)
        ]
        return {"content": content, "refusal": None}


def _told(piece: str, logprob: float) -> dict[str, Any]:
    return {"token": piece, "logprob": logprob, "bytes": None if UNKNOWN in piece else list(piece.encode())}
