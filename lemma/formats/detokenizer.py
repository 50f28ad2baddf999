"""Token ids to text, exactly as the tokenizer decodes them, special tokens included: by a table of bytes where its
vocabulary has one (`token_bytes`), in a fraction of the tokenizer's own time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lemma.formats.token_bytes import TokenBytes, is_byte_level

# Tokens that are decoded both ways before the table is trusted.
PROBED = 64


class Detokenizer:
    """The texts of ids by one tokenizer. Tokens may be added to it later, but its decoder stays as it is.

    Any thread may use it, as far as the tokenizer allows.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self._is_usual = _is_usual(tokenizer)
        self._bytes = TokenBytes(tokenizer.backend_tokenizer) if self._is_usual and is_byte_level(tokenizer) else None
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


def _is_usual(tokenizer: Any) -> bool:
    """Whether nothing but the tokenizers library decodes."""
    from transformers import PreTrainedTokenizerFast

    names = ("decode", "_decode")
    return isinstance(tokenizer, PreTrainedTokenizerFast) and all(
        getattr(type(tokenizer), name) is getattr(PreTrainedTokenizerFast, name) and name not in vars(tokenizer)
        for name in names
    )
