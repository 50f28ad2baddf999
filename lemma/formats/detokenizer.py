"""Token ids to text, exactly as the tokenizer decodes them, special tokens included.

The tokens of a byte-level vocabulary (GPT-2, Qwen, Llama 3, DeepSeek) are strings of bytes, each byte written as one
character. Their text is those bytes put together, read as UTF-8, so a table from ids to bytes decodes them in a
fraction of the tokenizer's own time. The table is filled as ids are met. All other tokenizers decode for themselves.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

# GPT-2 writes a byte as the character of that number if it is a printable one, and the others as those from 256 on.
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
# Characters of a token to those numbered like the bytes they stand for. Those that stand for no byte leave Latin-1.
TO_LATIN_1 = dict.fromkeys(OTHERS, "\u2020") | {256 + place: chr(byte) for place, byte in enumerate(OTHERS)}
# Tokens that are decoded both ways before the table is trusted.
PROBED = 64


class Detokenizer:
    """The texts of ids by one tokenizer. Tokens may be added to it later, but its decoder stays as it is.

    Any thread may use it, as far as the tokenizer allows.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self._is_usual = _is_usual(tokenizer)
        self._bytes = _TokenBytes(tokenizer.backend_tokenizer) if self._is_usual and _is_byte_level(tokenizer) else None
        if self._bytes is not None:
            probe = np.linspace(0, len(tokenizer) - 1, PROBED).astype(np.int64)
            if self._bytes.text(probe) != self._own(probe):
                self._bytes = None

    def text(self, ids: np.ndarray) -> str:
        text = self._bytes.text(ids) if self._bytes is not None else None
        return self._own(ids) if text is None else text

    def texts(self, many: Sequence[np.ndarray]) -> list[str]:
        """`text` for each; where the tokenizer decodes, on all cores if it has no `decode` of its own."""
        if self._bytes is None and self._is_usual:
            rows = [ids.tolist() for ids in many]
            return list(self.tokenizer.backend_tokenizer.decode_batch(rows, skip_special_tokens=False))
        return [self.text(ids) for ids in many]

    def _own(self, ids: np.ndarray) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


class _TokenBytes:
    """The bytes of every token of a byte-level vocabulary; None for those not met so far."""

    def __init__(self, backend: Any):
        self._backend = backend
        # Models often have a few more ids than their vocabulary has tokens.
        self._table = np.full(1 << backend.get_vocab_size().bit_length(), None, dtype=object)

    def text(self, ids: np.ndarray) -> str | None:
        """None if some of the ids are far outside of the vocabulary, or there are none."""
        if not len(ids) or ids.min() < 0:
            return None
        try:
            pieces = self._table.take(ids).tolist()
        except IndexError:
            return None
        try:
            joined = b"".join(pieces)
        except TypeError:  # one is None
            joined = b"".join(self._met(ids.tolist(), pieces))
        return joined.decode("utf-8", "replace")

    def _met(self, ids: list[int], pieces: list[bytes | None]) -> list[bytes]:
        """The pieces, with those that were not met before. An id without a token has none."""
        for place in [place for place, piece in enumerate(pieces) if piece is None]:
            token = self._backend.id_to_token(ids[place])
            if token is not None:
                pieces[place] = self._table[ids[place]] = _as_bytes(token)
        return [piece for piece in pieces if piece is not None]


def _as_bytes(token: str) -> bytes:
    """The bytes that a token's characters stand for; its own bytes if one stands for none, as in added tokens."""
    try:
        return token.translate(TO_LATIN_1).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


def _is_usual(tokenizer: Any) -> bool:
    """Whether nothing but the tokenizers library decodes."""
    from transformers import PreTrainedTokenizerFast

    names = ("decode", "_decode")
    return isinstance(tokenizer, PreTrainedTokenizerFast) and all(
        getattr(type(tokenizer), name) is getattr(PreTrainedTokenizerFast, name) and name not in vars(tokenizer)
        for name in names
    )


def _is_byte_level(tokenizer: Any) -> bool:
    from tokenizers import decoders

    decoder = tokenizer.backend_tokenizer.decoder
    if isinstance(decoder, decoders.Sequence):
        parts = json.loads(decoder.__getstate__())["decoders"]
        return [part["type"] for part in parts] == ["ByteLevel"]
    return isinstance(decoder, decoders.ByteLevel)
