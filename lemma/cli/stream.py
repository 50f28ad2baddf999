"""Words as they come: a streamer and a stopping rule for transformers' `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TextIO

import torch
from transformers import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from lemma.engines.text import UNKNOWN, StopTable, StopWatcher, decode


def ends_of(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every token that ends a completion: the tokenizer's, and those that the model's own settings name."""
    named = model.generation_config.eos_token_id
    several = named if isinstance(named, list) else [named]
    return frozenset(token for token in (*several, tokenizer.eos_token_id) if token is not None)


class StopAfter(StoppingCriteria):
    """Ends a sample after one of the strings. Called once for every token, with all samples."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]):
        self._tokenizer, self._table = tokenizer, StopTable(tokenizer, stops)
        self._watchers: list[StopWatcher] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if not self._watchers:
            self._watchers = [StopWatcher(self._tokenizer, self._table.stops, self._table) for _ in input_ids]
        newest = input_ids[:, -1].tolist()
        found = [watcher.feed(token) for watcher, token in zip(self._watchers, newest, strict=True)]
        return torch.tensor(found, device=input_ids.device)


class Words(BaseStreamer):
    """Prints a completion while it is made, except the prompt and the token that ends it."""

    def __init__(self, tokenizer: Any, ends: frozenset[int], stream: TextIO):
        self._tokenizer, self._ends, self._stream = tokenizer, ends, stream
        self._ids: list[int] = []
        self._shown = ""
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        if self._is_prompt:
            self._is_prompt = False
            return
        self._ids += [token for token in value.reshape(-1).tolist() if token not in self._ends]
        text = decode(self._tokenizer, self._ids)
        # A character may need several tokens; until it is whole, decoding ends in a replacement character.
        if not text.endswith(UNKNOWN) and text.startswith(self._shown):
            self._stream.write(text[len(self._shown) :])
            self._stream.flush()
            self._shown = text

    def end(self) -> None:
        text = decode(self._tokenizer, self._ids)
        self._stream.write(text[len(self._shown) :] + "\n")
        self._stream.flush()
