"""How trajectories become packs, and what a pack says about its tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lemma.core.types import Trajectory
from lemma.models.attention import _bucketed
from lemma.models.packing import BUCKET_RATIO, Segments, TokenBatch, first_fit, plan_packs
from lemma.models.varlen_attention import AttentionSpec
from tests.models.small import CPU, trajectories


def bare(length: int, group_id: int = 0) -> Trajectory:
    return Trajectory(np.arange(length), np.arange(length) > 0, group_id=group_id)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 4)), max_size=25), st.integers(1, 120), st.booleans())
def test_packs_keep_to_the_budget(shape: list[tuple[int, int]], budget: int, pairs: bool) -> None:
    items = [bare(length, group_id) for length, group_id in shape]
    packs = plan_packs(items, budget, "pair" if pairs else "token")
    assert sorted(i for pack in packs for i in pack) == list(range(len(items)))
    for pack in packs:
        groups = {items[i].group_id for i in pack} if pairs else set(pack)
        assert sum(len(items[i]) for i in pack) <= budget or len(groups) == 1
        if pairs:
            assert sum(item.group_id in groups for item in items) == len(pack)


def test_packs_are_full() -> None:
    packs = plan_packs([bare(n) for n in (10, 30, 20, 40, 25, 15, 60)], 100, "token")
    assert packs == [[3, 6], [0, 1, 2, 4, 5]]


@settings(deadline=None)
@given(st.lists(st.integers(1, 60), max_size=40), st.integers(1, 50))
def test_every_size_goes_into_the_first_pack_that_has_room(sizes: list[int], capacity: int) -> None:
    room: list[int] = []
    for size, place in zip(sizes, first_fit(sizes, capacity), strict=True):
        wanted = next((pack for pack, left in enumerate(room) if left >= size), len(room))
        assert place == wanted
        room += [capacity] * (wanted == len(room))
        room[wanted] -= size


def test_a_pack_knows_its_tokens() -> None:
    items = trajectories((3, 1, 4), seed=4, share=0.9)
    items[0].loss_mask_T[:] = [False, True, True]
    items[2].loss_mask_T[:] = [False, False, True, True]
    batch = TokenBatch.build(items, [2, 0, 1], CPU, torch.float64)
    assert batch.ids_T.tolist() == [*items[2].ids_T, *items[0].ids_T, *items[1].ids_T]
    assert batch.positions_T.tolist() == [0, 1, 2, 3, 0, 1, 2, 0]
    assert batch.targets_N.tolist() == [2, 3, 5, 6]
    assert batch.sequence_N.tolist() == [0, 0, 1, 1]
    assert batch.group_B.tolist() == [1, 0, 0]
    assert batch.index_B == (2, 0, 1)
    assert (batch.tokens, batch.trained_tokens) == (8, 4)
    expected = [*items[2].token_fields["advantage"][2:], *items[0].token_fields["advantage"][1:]]
    assert batch.token_fields["advantage"].tolist() == expected
    assert batch.fields["weight"].tolist() == [items[i].fields["weight"] for i in (2, 0, 1)]
    assert batch.segments.borders_B1.tolist() == [0, 4, 7, 8]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20))
def test_buckets_hold_every_token_once_with_little_padding(lengths: list[int]) -> None:
    buckets = Segments(tuple(lengths), CPU).buckets
    assert sorted(int(t) for bucket in buckets for t in bucket.into_M) == list(range(sum(lengths)))
    for bucket in buckets:
        real = len(bucket.take_M)
        assert bucket.rows_BL.numel() <= real * BUCKET_RATIO
        assert torch.equal(bucket.rows_BL.flatten()[bucket.take_M], bucket.into_M)


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
def test_bucketed_attention_never_crosses_a_border(window: int | None, heads: tuple[int, int]) -> None:
    torch.manual_seed(0)
    lengths, width = (1, 9, 4, 10, 3), 8
    total = sum(lengths)
    query = torch.randn(heads[0], total, width, dtype=torch.float64, requires_grad=True)
    key, value = (torch.randn(heads[1], total, width, dtype=torch.float64, requires_grad=True) for _ in range(2))
    segments = Segments(lengths, CPU)
    inputs_THD = (x.transpose(0, 1) for x in (query, key, value))
    mine = _bucketed(*inputs_THD, AttentionSpec(segments, segments, 0.3, window))

    owner = torch.repeat_interleave(torch.tensor(lengths))
    distance = torch.arange(total)[:, None] - torch.arange(total)[None, :]
    allowed = (owner[:, None] == owner[None, :]) & (distance >= 0) & (distance < (window or total))
    spread = [x.repeat_interleave(heads[0] // heads[1], dim=0) for x in (key, value)]
    scores = (query @ spread[0].transpose(1, 2) * 0.3).masked_fill(~allowed, -torch.inf)
    plain = (scores.softmax(-1) @ spread[1]).transpose(0, 1)
    torch.testing.assert_close(mine, plain, rtol=1e-12, atol=1e-12)
    pull = torch.randn_like(plain)
    for a, b in zip(*(torch.autograd.grad(out, (query, key, value), pull) for out in (mine, plain)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
