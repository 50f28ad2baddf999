"""What a stream gives out piece by piece is what the whole says, wherever tokens and stop strings begin and end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lemma.models.tiny import tiny_tokenizer
from lemma.serving.text_stream import TextStream
from tests.formats.tokenizers_made_here import make_tokenizer

BYTES, WORDS = make_tokenizer(), tiny_tokenizer()
END = 1  # </s> of the one, <eos> of the other
PIECES = [*"ab\n🙂é日", "<think>", "</answer>", "stop", "sto", "top", "aba"]


def plain(tokenizer: object, ids: Sequence[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)  # type: ignore[attr-defined]


def spoken(stream: TextStream, ids: Sequence[int], cuts: Sequence[int], finish: str) -> str:
    """All that is given out where the tokens come in pieces of these lengths."""
    said, place = "", 0
    for length in (*cuts, len(ids)):
        said += stream.feed(ids[place : place + length])
        place += length
    return said + stream.finish(finish)


@given(
    st.lists(st.sampled_from(PIECES), max_size=12),
    st.lists(st.integers(0, 5), max_size=6),
    st.lists(st.sampled_from(["stop", "aba", "b\n", "🙂", "日a"]), max_size=2),
)
def test_pieces_make_the_whole(pieces: list[str], lengths: list[int], stops: list[str]) -> None:
    ids = BYTES.encode("".join(pieces), add_special_tokens=False)
    # An engine ends with the token in which the first stop string ends.
    ends = [k for k in range(1, len(ids) + 1) if any(stop in plain(BYTES, ids[:k]) for stop in stops)]
    ids = ids[: ends[0]] if ends else ids
    text = plain(BYTES, ids)
    begins = [text.index(stop) for stop in stops if stop in text]

    def decode(some: Sequence[int]) -> str:
        return plain(BYTES, some)

    finish = "stop" if ends else "length"
    stream = TextStream(decode, {END}, cuts=stops)
    assert spoken(stream, ids, lengths, finish) == stream.text == text[: min(begins, default=len(text))]
    if ends:
        kept = min(text.index(stop) + len(stop) for stop in stops if stop in text)
        assert spoken(TextStream(decode, {END}, keeps=stops), ids, lengths, finish) == text[:kept]


@pytest.mark.parametrize(("finish", "text"), [("stop", "ben has"), ("length", "ben has <eos>")])
def test_the_end_token_is_text_only_where_it_ended_nothing(finish: str, text: str) -> None:
    ids = [*WORDS.encode("ben has"), END]
    assert spoken(TextStream(lambda some: plain(WORDS, some), {END}), ids, [1, 1], finish) == text
    assert spoken(TextStream(lambda some: plain(WORDS, some), {END}), [END, *ids], [2], finish) == f"<eos> {text}"


def test_early_tokens_end_nothing() -> None:
    ids = BYTES.encode("stop stop", add_special_tokens=False)
    stream = TextStream(lambda some: plain(BYTES, some), {END}, cuts=["stop"], min_tokens=len(ids) // 2)
    assert spoken(stream, ids, [1] * len(ids), "stop") == "stop "
