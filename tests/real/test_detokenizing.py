"""Ids to text with vocabularies of published models, through the table of bytes where they are byte-level."""

from __future__ import annotations

import numpy as np

from lemma.formats.detokenizer import Detokenizer
from tests.real.conftest import Vocabulary, read_once

NOT_BYTE_LEVEL = {"llama-spm", "phi-3"}


def test_every_token_and_any_row_of_tokens_has_the_tokenizers_text(vocabulary: Vocabulary) -> None:
    tokenizer = read_once(vocabulary.gguf)
    backend, size, rng = tokenizer.backend_tokenizer, len(tokenizer), np.random.default_rng(0)
    detokenizer = Detokenizer(tokenizer)
    assert (detokenizer._bytes is None) == (vocabulary.name in NOT_BYTE_LEVEL)
    special = np.array(sorted(tokenizer.added_tokens_decoder))
    rows = list(np.arange(size, dtype=np.int32)[:, None])
    rows += list(rng.integers(0, size, (20_000, 2)))
    # The few tokens of single bytes among many: characters that are whole, cut off, and in pieces.
    short = np.array([token for token in range(size) if len(backend.id_to_token(token) or "") == 1])
    rows += list(rng.choice(short, (20_000, 6)))
    rows += list(rng.integers(0, size + 300, (50, 600)))
    rows += [np.array(ids, dtype=np.int64) for _, ids in vocabulary.samples]
    rows += [np.stack([rng.choice(special, 30), rng.choice(short, 30)], axis=1).ravel()]
    assert detokenizer.texts(rows) == backend.decode_batch([ids.tolist() for ids in rows], skip_special_tokens=False)
    for ids in rows[-20:]:
        own = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert detokenizer.text(ids) == own
