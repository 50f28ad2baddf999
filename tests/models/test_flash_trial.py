"""The trial of FlashAttention 4, with stand-ins for it: on a CPU, dense attention takes the place of torch's kernel."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lemma.models import flash_attention
from lemma.models.attention import window_mask
from lemma.models.flash_attention import AttentionKind
from lemma.models.varlen_attention import AttentionSpec

Kernel = Callable[..., torch.Tensor]


def dense(
    query_THD: torch.Tensor, key_THD: torch.Tensor, value_THD: torch.Tensor, *, window: int | None, **kwargs: Any
) -> torch.Tensor:
    """Attention within each sequence, whose queries are its last tokens."""
    groups, parts = query_THD.shape[1] // key_THD.shape[1], []
    queries, keys = (kwargs[name].diff().tolist() for name in ("cu_seqlens_q", "cu_seqlens_k"))
    for query, key, value in zip(query_THD.split(queries), key_THD.split(keys), value_THD.split(keys), strict=True):
        seen = window_mask(len(key), window or len(key), query.device, len(key) - len(query))
        scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(groups, 1)) * kwargs["softmax_scale"]
        shares = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        parts.append(torch.einsum("hqk,khd->qhd", shares, value.repeat_interleave(groups, 1)))
    return torch.cat(parts)


def right(*parts: torch.Tensor, window_size: tuple[int | None, int | None], **kwargs: Any) -> torch.Tensor:
    """FlashAttention, as its interface has it."""
    return dense(*parts, window=None if window_size[0] is None else window_size[0] + 1, **kwargs)


class SpoiltKey(torch.autograd.Function):
    """A key that passes through, and whose gradient is NaN."""

    @staticmethod
    def forward(ctx: Any, key: torch.Tensor) -> torch.Tensor:
        return key.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return torch.full_like(grads[0], torch.nan)


def spoilt(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return right(query, SpoiltKey.apply(key), value, **kwargs)


@pytest.fixture
def trial(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str | None]:
    """What the trial says of a stand-in."""

    def by_torch(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        borders = {"cu_seqlens_q": spec.queries.borders_B1, "cu_seqlens_k": spec.keys.borders_B1}
        return dense(query, key, value, window=spec.window, softmax_scale=spec.scale, **borders)

    def tried(function: Kernel, has_window: bool = False) -> str | None:
        kind = AttentionKind(
            torch.device("cpu"), torch.float32, heads=4, kv_heads=2, size=64, has_window=has_window, deterministic=False
        )
        return flash_attention._mismatch(function, kind)

    monkeypatch.setattr(flash_attention, "varlen", by_torch)
    return tried


@pytest.mark.parametrize("has_window", [False, True])
def test_one_that_agrees_passes_without_a_word(trial: Callable[..., str | None], has_window: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert trial(right, has_window) is None


def test_one_that_is_wrong_without_a_gradient_is_found(trial: Callable[..., str | None]) -> None:
    def careless(*parts: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return right(*parts, **kwargs) * (1.0 if parts[0].requires_grad else 1.1)

    def broken(*parts: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if not parts[0].requires_grad:
            raise RuntimeError("lse is None\nand a long story")
        return right(*parts, **kwargs)

    assert trial(careless) == "is off by 0.1"
    assert trial(broken) == "fails (lse is None)"


def test_a_gradient_that_is_nan_is_found(trial: Callable[..., str | None]) -> None:
    assert trial(spoilt) == "is off by nan"
