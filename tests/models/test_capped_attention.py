"""Capped attention in chunks of queries beside the plain formula: values, gradients, and how much is held."""

from __future__ import annotations

import pytest
import torch

from lemma.models import capped_attention
from lemma.models.attention import rows_seen, window_mask
from lemma.models.capped_attention import capped

ROWS, HEADS, SHARED, KEYS, SIZE = 2, 4, 2, 23, 5
SCALE, CAP = 0.4, 1.5


def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    key, value = (x.repeat_interleave(HEADS // SHARED, dim=1) for x in (key, value))
    scores = CAP * torch.tanh(SCALE * query @ key.transpose(-1, -2) / CAP)
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value


def tensors(queries: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(ROWS, HEADS, queries, SIZE), (ROWS, SHARED, KEYS, SIZE), (ROWS, SHARED, KEYS, SIZE)]
    return [(2 * torch.randn(shape)).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("queries", [1, 9, KEYS])
@pytest.mark.parametrize("at_a_time", [1, 4, 100])
def test_chunks_are_the_formula_and_hold_so_many_scores(
    window: int | None, queries: int, at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capped_attention, "SCORE_BYTES", at_a_time * ROWS * HEADS * KEYS * 8)
    inputs = tensors(queries, torch.float64)
    seen, asked = rows_seen(KEYS, queries, window, torch.device("cpu")), []

    def visible(start: int, end: int) -> torch.Tensor:
        asked.append(end - start)
        return seen(start, end)

    mine = capped(*inputs, visible, SCALE, CAP)
    wanted = plain(*inputs, window_mask(KEYS, window or KEYS, torch.device("cpu"), KEYS - queries))
    torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-12)
    pull = torch.randn_like(mine)
    for a, b in zip(*(torch.autograd.grad(made, inputs, pull) for made in (mine, wanted)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
    assert sum(asked) == 2 * queries and max(asked) == min(at_a_time, queries)


def test_a_mask_for_each_row_and_nothing_to_see() -> None:
    """A row of padding sees nothing: it gets numbers, and gives no gradient to the scores."""
    query, key, value = tensors(KEYS, torch.float64)
    mask = window_mask(KEYS, KEYS, torch.device("cpu")).repeat(ROWS, 1, 1, 1)
    mask[1, :, :3] = False
    mine = capped(query, key, value, lambda start, end: mask[..., start:end, :], SCALE, CAP)
    torch.testing.assert_close(mine[0], plain(query, key, value, mask)[0], rtol=1e-12, atol=1e-12)
    assert mine.isfinite().all()
    (pulled,) = torch.autograd.grad(mine[1].sum(), query)
    assert not pulled[1, :, :3].any() and pulled[1, :, 3:].any()


def test_low_precision_is_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of keys that all chunks add to are as good as in one piece."""
    seen = rows_seen(KEYS, KEYS, None, torch.device("cpu"))
    found = []
    for size in (2**26, 1):
        monkeypatch.setattr(capped_attention, "SCORE_BYTES", size)
        inputs = tensors(KEYS, torch.bfloat16)
        out = capped(*inputs, seen, SCALE, CAP)
        assert out.dtype == torch.bfloat16
        found.append([out, *torch.autograd.grad(out.float().sin().sum(), inputs)])
    for whole, parts in zip(*found, strict=True):
        torch.testing.assert_close(whole, parts, rtol=8e-3, atol=1e-6)


def test_a_long_sequence_never_holds_all_of_its_scores() -> None:
    """8,192 tokens of 16 heads (Gemma 2 9B): whole scores are 4 GiB in float32."""
    query, key = torch.empty(1, 16, 8192, 256, device="meta"), torch.empty(1, 8, 8192, 256, device="meta")
    widest = max(end - start for start, end in capped_attention._chunks(query, key))
    assert 4 * widest * 16 * 8192 * 4 <= 2**28
