"""Words as they come, and what a finished completion says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TextIO

from lemma.engines.stop_strings import UNKNOWN, decode

if TYPE_CHECKING:
    import numpy as np

    from lemma.engines.protocol import Completion


class Words:
    """Prints one completion while it is made, except the token that ends it."""

    def __init__(self, tokenizer: Any, ends: frozenset[int], stream: TextIO):
        self._tokenizer, self._ends, self._stream = tokenizer, ends, stream
        self._ids: list[int] = []
        self._shown = ""

    def hear(self, ids: np.ndarray) -> None:
        for token in ids.tolist():
            self._ids += [] if token in self._ends else [token]
            text = decode(self._tokenizer, self._ids)
            # A character may need several tokens; until it is whole, decoding ends in a replacement character.
            if not text.endswith(UNKNOWN) and text.startswith(self._shown):
                self._write(text)

    def end(self) -> None:
        self._write(decode(self._tokenizer, self._ids))
        self._stream.write("\n")
        self._stream.flush()

    def _write(self, text: str) -> None:
        self._stream.write(text[len(self._shown) :])
        self._stream.flush()
        self._shown = text


def token_lines(completion: Completion, tokenizer: Any) -> list[str]:
    """One line for each token: its log-probability and its text; then their sum and mean."""
    lines = [
        f"{logprob:10.4f}  {decode(tokenizer, [token])!r}"
        for token, logprob in zip(completion.ids.tolist(), completion.logprobs.tolist(), strict=True)
    ]
    count = len(completion.ids)
    total = float(completion.logprobs.sum())
    return [*lines, f"log-probability: {total:.4f} in all, {total / max(count, 1):.4f} a token, {count} tokens"]
