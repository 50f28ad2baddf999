"""The bytes of each token of a byte-level vocabulary (GPT-2, Qwen, Llama 3, DeepSeek).

Its tokens are strings of bytes, each byte written as one character. Their text is those bytes put together, read as
UTF-8. The table is filled as ids are met.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

# GPT-2 writes a byte as the character of that number if it is a printable one, and the others as those from 256 on.
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
# Characters of a token to those numbered like the bytes they stand for. Those that stand for no byte leave Latin-1.
TO_LATIN_1 = dict.fromkeys(OTHERS, "\u2020") | {256 + place: chr(byte) for place, byte in enumerate(OTHERS)}


class TokenBytes:
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


def is_byte_level(tokenizer: Any) -> bool:
    from tokenizers import decoders

    decoder = tokenizer.backend_tokenizer.decoder
    if isinstance(decoder, decoders.Sequence):
        parts = json.loads(decoder.__getstate__())["decoders"]
        return [part["type"] for part in parts] == ["ByteLevel"]
    return isinstance(decoder, decoders.ByteLevel)
