"""Rows of the journal are what `json.dumps` would write, to the last byte."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lemma.rollouts import Episode, Turn
from lemma.rollouts.journal_rows import MOST_SHARED, VERSION, RowWriter
from tests.rollouts.episode_rows import row_of

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NUMBER = st.one_of(st.floats(), st.integers(-3, 3), st.booleans(), st.floats(width=32).map(np.float64))
MAYBE = st.one_of(st.none(), NUMBER)


def plain(episode: Episode) -> str:
    return json.dumps({"version": VERSION, **row_of(episode)}, ensure_ascii=False)


@st.composite
def turns(draw: Any, prompts: list[np.ndarray]) -> Turn:
    ids = np.array(draw(st.lists(st.integers(0, 2**31 - 1), max_size=4)), dtype=draw(st.sampled_from(["i4", "i8"])))
    logprobs = np.array(draw(st.lists(st.floats(width=32), min_size=len(ids), max_size=len(ids))), dtype="f8")
    return Turn(
        draw(st.sampled_from(prompts)), ids,
        logprobs.astype(draw(st.sampled_from(["f4", "f8"]))), np.zeros_like(logprobs),
        draw(st.sampled_from(["stop", "length"])), tuple(draw(st.lists(st.tuples(*[st.integers(0, 9)] * 2)))),
        draw(st.integers(0, 3)), draw(st.booleans()), draw(TEXT), draw(TEXT), draw(st.booleans()),
        draw(st.integers(0, 3)), draw(st.integers(0, 3)), draw(MAYBE), draw(NUMBER),
    )  # fmt: skip


@st.composite
def episodes(draw: Any) -> list[Episode]:
    prompts = [np.arange(3, dtype=np.int32), np.arange(4, dtype=np.int64), np.zeros(0, dtype=np.int32)]
    found = []
    for number in range(draw(st.integers(1, 4))):
        said = draw(st.lists(turns(prompts), min_size=1, max_size=3))
        reasoning = draw(st.one_of(st.none(), TEXT, st.just(said[-1].text)))
        rest = (draw(st.one_of(st.none(), TEXT)), tuple(draw(st.lists(TEXT, max_size=2))), draw(st.booleans()))
        worth = (draw(st.dictionaries(TEXT, MAYBE, max_size=2)), draw(MAYBE))
        found.append(
            Episode(("rl", draw(TEXT), number), number, "p", said, draw(st.sampled_from(["", "1 + 1?", '"\n'])),
                    tuple(draw(st.lists(TEXT, max_size=2))), reasoning, *rest,
                    draw(st.sampled_from([None, "right"])), draw(TEXT), *worth)
        )  # fmt: skip
    return found


@settings(max_examples=150, deadline=None)
@given(episodes())
def test_a_row_is_what_json_makes_of_it(made: list[Episode]) -> None:
    writer = RowWriter()
    assert [writer.line(one) for one in made] == [plain(one) for one in made]


def test_values_that_are_equal_but_written_otherwise() -> None:
    nothing = np.zeros(0, dtype=np.float32)
    turn = Turn(np.array([1], dtype=np.int32), nothing.astype(np.int32), nothing, nothing, "stop")
    keys: list[Any] = [("rl", 1, 0.0), ("rl", True, 0.0), ("rl", 1, -0.0), ("rl", ("a", 2), [3])]
    writer, made = RowWriter(), [Episode(key, 0, "p", [turn], "?") for key in keys]
    assert [writer.line(one) for one in made] == [plain(one) for one in made]


def test_prompts_that_come_and_go_are_not_mixed_up() -> None:
    """Later ones may lie where earlier ones lay in memory."""
    writer, nothing = RowWriter(), np.zeros(0, dtype=np.float32)
    for number in range(3 * MOST_SHARED):
        turn = Turn(np.array([number], dtype=np.int32), nothing.astype(np.int32), nothing, nothing, "stop")
        episode = Episode(("rl", 1, number), 0, "p", [turn], f"what is {number}?")
        assert writer.line(episode) == plain(episode)
