"""Stop strings are found wherever they begin and end, for tokenizers of every kind."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lemma.engines.stop_strings import StopTable, StopWatcher, decode
from lemma.models.tiny import tiny_tokenizer

CORPUS = [
    "<think> so 6 times 7 is 42 </think><answer>42</answer>",
    "stop here\n\nUser: 数学は楽しい é ñ 😀",
    "a > b >> c",
] * 4


@cache
def byte_level() -> Any:
    """Byte-level BPE: a character may be spread over tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, special_tokens=["<eos>", "</answer>"])
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


@cache
def metaspace() -> Any:
    """Words that carry their leading space, which decoding strips at the very beginning; unknown bytes fall back."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokens = ["<unk>", "<eos>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, special_tokens=tokens))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>")


TOKENIZERS = {"byte_level": byte_level, "metaspace": metaspace, "words": cache(tiny_tokenizer)}


def first_stop(tokenizer: Any, ids: list[int], stops: tuple[str, ...]) -> int | None:
    """How many tokens it takes until the decoded text holds a stop string: slow and plain."""
    for count in range(1, len(ids) + 1):
        text = decode(tokenizer, ids[:count])
        if any(stop in text for stop in stops):
            return count
    return None


def watched(tokenizer: Any, ids: list[int], stops: tuple[str, ...]) -> int | None:
    watcher = StopWatcher(tokenizer, stops)
    return next((count for count, token in enumerate(ids, 1) if watcher.feed(token)), None)


@pytest.mark.parametrize(
    ("text", "stop"),
    [
        ("so it is </think><answer>42</answer> and more", "</answer>"),
        ("so it is </think><answer>42</answer> and more", "k><an"),
        ("stop here\n\nUser: more", "\n\nUser:"),
        ("stop here\n\nUser: more", "e\n"),
        ("a 数学は楽しい b", "学は楽"),
        ("ha 😀 ha", "😀"),
        ("no stop at all", "</answer>"),
        ("a > b >> c", ">>"),
    ],
)
@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
def test_a_stop_string_is_found_in_the_token_that_ends_it(kind: str, text: str, stop: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    for ids in (tokenizer.encode(text), [i for c in text for i in tokenizer.encode(c, add_special_tokens=False)]):
        assert watched(tokenizer, ids, (stop,)) == first_stop(tokenizer, ids, (stop,))
    if "no stop" not in text:
        assert watched(tokenizer, tokenizer.encode(text), (stop,)) is not None


def test_words_joined_by_the_decoder() -> None:
    tokenizer = TOKENIZERS["words"]()
    ids = tokenizer.encode("<think> 1 + 2 </think> <answer> 3 </answer> 4")
    for stop in ("</answer>", "> <answer> 3", "2 <", "+ "):
        assert watched(tokenizer, ids, (stop,)) == first_stop(tokenizer, ids, (stop,)) is not None


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_ids_and_any_stops_agree_with_the_whole_text(kind: str, data: st.DataObject) -> None:
    """Random ids, among them broken characters; stops cut out of their text, and others."""
    tokenizer = TOKENIZERS[kind]()
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), min_size=1, max_size=40))
    text = decode(tokenizer, ids)
    begin = data.draw(st.integers(0, len(text)))
    piece = text[begin : begin + data.draw(st.integers(1, 6))]
    # Broken characters change when the next byte comes: they are no text that one could ask for.
    stops = tuple(
        stop for stop in (piece, data.draw(st.sampled_from(["</", "42", "é", ">"]))) if stop and "\ufffd" not in stop
    )
    if kind == "metaspace" and any(stop.startswith(" ") for stop in stops):
        return  # the decoder strips the space at the beginning of what it is given
    assert watched(tokenizer, ids, stops) == first_stop(tokenizer, ids, stops)


def test_special_tokens_are_text() -> None:
    tokenizer = byte_level()
    special = tokenizer.convert_tokens_to_ids("</answer>")
    assert watched(tokenizer, [5, 6, special], ("</answer>",)) == 3
    assert watched(tokenizer, [5, 6, special], ("r>",)) == 3


def test_a_stop_is_reported_again_only_where_it_ends_again() -> None:
    """With min_tokens a completion goes on after an early stop, which must not end it later."""
    tokenizer = byte_level()
    watcher = StopWatcher(tokenizer, (">",))
    ids = [i for c in "a>bc>" for i in tokenizer.encode(c)]
    assert [watcher.feed(i) for i in ids] == [False, True, False, False, True]


def test_without_stop_strings_nothing_is_decoded() -> None:
    assert not StopWatcher(None, ()).feed(7)


def test_most_tokens_are_not_decoded_twice() -> None:
    tokenizer = byte_level()
    table = StopTable(tokenizer, ("</answer>",))
    assert not table.may_end(tokenizer.convert_tokens_to_ids("a"))
    assert table.may_end(tokenizer.convert_tokens_to_ids(">"))
    long = tokenizer.encode("so " * 500 + "<answer>42</answer>")
    watcher = StopWatcher(tokenizer, (), table)
    assert [watcher.feed(i) for i in long].index(True) == len(long) - 1
