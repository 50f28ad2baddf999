"""Ids to text through the table of bytes: the tokenizer's own text, to the character."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lemma.formats.detokenizer import Detokenizer
from lemma.formats.token_bytes import OTHERS, TO_LATIN_1
from lemma.models.tiny import tiny_tokenizer
from tests.formats.tokenizers_made_here import make_spacing_tokenizer, make_tokenizer

# Added tokens of every kind: ASCII, a space, characters that stand for bytes, that stand for none, and both.
ADDED = [
    AddedToken("<tool>", special=True),
    AddedToken("two words"),
    AddedToken("\u00e9t\u00e9"),
    AddedToken("\u2581mark\u2581"),
    AddedToken("\u0120\u00ad"),
    AddedToken("\u65e5\u672c", special=True),
]


def byte_level(decoder: Any = None) -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer(bos=True)
    tokenizer.backend_tokenizer.decoder = decoder or decoders.ByteLevel()
    tokenizer.add_tokens(ADDED)
    return tokenizer


def as_it_says(tokenizer: Any, ids: Any) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def from_table(detokenizer: Detokenizer, ids: Any) -> str:
    """The text, if the table and not the tokenizer gives it."""
    assert detokenizer._bytes is not None
    text = detokenizer._bytes.text(np.asarray(ids, dtype=np.int32))
    assert text is not None
    return text


def test_the_characters_of_bytes_are_those_of_the_library() -> None:
    characters = {chr(byte) for byte in range(256) if byte not in OTHERS} | {chr(256 + i) for i in range(len(OTHERS))}
    assert characters == set(pre_tokenizers.ByteLevel.alphabet())
    assert {256 + i: chr(byte) for i, byte in enumerate(OTHERS)}.items() <= TO_LATIN_1.items()


@pytest.mark.parametrize("decoder", [None, decoders.Sequence([decoders.ByteLevel()])])
def test_a_byte_level_vocabulary_is_read_from_the_table(decoder: Any) -> None:
    tokenizer = byte_level(decoder)
    detokenizer, rng = Detokenizer(tokenizer), np.random.default_rng(0)
    for token in range(len(tokenizer)):
        assert from_table(detokenizer, [token]) == as_it_says(tokenizer, [token])
    for length in [2] * 2000 + [40] * 200:
        ids = rng.integers(0, len(tokenizer), length)
        assert from_table(detokenizer, ids) == as_it_says(tokenizer, ids)


def test_broken_utf_8_becomes_the_same_replacement_characters() -> None:
    tokenizer, rng = byte_level(), np.random.default_rng(1)
    detokenizer = Detokenizer(tokenizer)
    token_of = {}
    for token in range(len(tokenizer)):
        name = tokenizer.backend_tokenizer.id_to_token(token)
        if name is not None and len(name) == 1:
            token_of[ord(name.translate(TO_LATIN_1))] = token
    assert set(range(256)) <= set(token_of)
    edges = [0x00, 0x41, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xC1, 0xC2, 0xDF, 0xE0, 0xE1, 0xEC, 0xED, 0xEE]
    edges += [0xEF, 0xF0, 0xF1, 0xF3, 0xF4, 0xF5, 0xF7, 0xF8, 0xFB, 0xFC, 0xFE, 0xFF]
    for _ in range(20_000):
        ids = [token_of[byte] for byte in rng.choice(edges, rng.integers(1, 9))]
        assert from_table(detokenizer, ids) == as_it_says(tokenizer, ids)


def test_ids_without_a_token_are_passed_over_and_tokens_may_be_added_later() -> None:
    tokenizer = byte_level()
    detokenizer, size = Detokenizer(tokenizer), len(tokenizer)
    ids = [260, size, 261, size + 1]
    assert from_table(detokenizer, ids) == as_it_says(tokenizer, ids) == as_it_says(tokenizer, [260, 261])
    tokenizer.add_tokens([AddedToken("<late>"), AddedToken("<later>", special=True)])
    assert from_table(detokenizer, ids) == as_it_says(tokenizer, ids)
    assert "<late>" in detokenizer.text(np.array(ids)) and "<later>" in detokenizer.text(np.array(ids))


def test_ids_that_no_model_has_are_left_to_the_tokenizer() -> None:
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.text(np.array([260, 2_000_000_000])) == as_it_says(tokenizer, [260])
    assert detokenizer.text(np.zeros(0, dtype=np.int32)) == ""
    with pytest.raises(OverflowError):
        detokenizer.text(np.array([-1]))


def test_many_texts_are_those_of_each_in_all_kinds_of_tokenizers() -> None:
    rng = np.random.default_rng(2)
    plain = make_tokenizer()
    plain.backend_tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.ByteLevel()])
    for tokenizer in (byte_level(), tiny_tokenizer(["<a b>"]), make_spacing_tokenizer(), plain, _Own.like(plain)):
        rows = [rng.integers(0, len(tokenizer) + 9, length).astype(np.int32) for length in (0, 1, 3, 50, 0, 400)]
        detokenizer = Detokenizer(tokenizer)
        assert detokenizer.texts(rows) == [detokenizer.text(ids) for ids in rows]
        assert detokenizer.texts(rows) == [as_it_says(tokenizer, ids) for ids in rows]


def test_only_byte_level_vocabularies_have_a_table() -> None:
    words = make_tokenizer()
    words.backend_tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.ByteLevel()])
    patched = make_tokenizer()
    patched.decode = lambda *given, **named: "patched"
    for tokenizer in (tiny_tokenizer(), make_spacing_tokenizer(), words, _Own.like(words), patched):
        assert Detokenizer(tokenizer)._bytes is None
    assert Detokenizer(patched).text(np.array([5])) == "patched"
    assert Detokenizer(patched).texts([np.array([5])]) == ["patched"]


def test_a_table_that_the_tokenizer_contradicts_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lemma.formats.token_bytes._as_bytes", str.encode)
    tokenizer = byte_level()
    assert Detokenizer(tokenizer)._bytes is None


def test_cleaning_up_spaces_is_never_asked_for() -> None:
    backend = Tokenizer(models.WordLevel({"a": 0, "\u0120.": 1, "\u0120'": 2, "s": 3, "<unk>": 4}, unk_token="<unk>"))
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=True)
    assert tokenizer.decode([0, 1]) == "a."
    assert from_table(Detokenizer(tokenizer), [0, 1]) == "a ."


def test_a_token_is_looked_up_once() -> None:
    tokenizer, asked = byte_level(), []
    detokenizer = Detokenizer(tokenizer)
    table = detokenizer._bytes
    assert table is not None
    backend = table._backend

    class Counting:
        def id_to_token(self, number: int) -> str | None:
            asked.append(number)
            name: str | None = backend.id_to_token(number)
            return name

    table._backend = Counting()
    for ids in pairwise(range(40, 60)):
        detokenizer.text(np.array(ids))
    assert len(asked) == len(set(asked)) and set(asked) <= set(range(40, 60))


class _Own(PreTrainedTokenizerFast):
    """A tokenizer that changes what its library decodes."""

    @classmethod
    def like(cls, other: PreTrainedTokenizerFast) -> _Own:
        return cls(tokenizer_object=other.backend_tokenizer)

    def _decode(self, *given: Any, **named: Any) -> str:
        return super()._decode(*given, **named).upper()
