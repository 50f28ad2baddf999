"""Ways to compute a model wrongly, planted in Lemma's half of the work and not in the model's own forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lemma.engines.native.engine import NativeEngine
from lemma.models import blocks
from lemma.models.policy import Policy

Fault = Callable[[Policy, pytest.MonkeyPatch], None]


def _around(policy: Policy, monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[..., Any]) -> None:
    """Give one of the policy's two ways to hidden states other arguments."""
    original = getattr(policy, name)
    monkeypatch.setattr(policy, name, lambda *arguments: change(original, *arguments), raising=False)


def rotation_off_by_one(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the ninth token on, every position is one too large."""

    def shifted(original: Any, ids: torch.Tensor, positions: torch.Tensor, rest: Any) -> Any:
        return original(ids, positions + (positions > 8), rest)

    for name in ("hidden", "hidden_cached"):
        _around(policy, monkeypatch, name, shifted)


def wrong_rope_base(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    rotary = policy.backbone.rotary_emb
    dim = 2 * rotary.inv_freq.shape[0]
    wrong = 10_000.0 ** (-torch.arange(0, dim, 2, device=rotary.inv_freq.device) / dim)

    def other_base(original: Any, *arguments: Any) -> Any:
        right, rotary.inv_freq = rotary.inv_freq, wrong
        try:
            return original(*arguments)
        finally:
            rotary.inv_freq = right

    for name in ("hidden", "hidden_cached"):
        _around(policy, monkeypatch, name, other_base)


def window_on_one_side_only(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    for layer in policy.backbone.layers:
        monkeypatch.setattr(layer.self_attn, "lemma_window", 24, raising=False)


def soft_capped_logits(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    head, original = policy.head, policy.head.forward
    monkeypatch.setattr(head, "forward", lambda x: 30.0 * torch.tanh(original(x) / 30.0))


def norm_with_one_more(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    original = blocks.rms_norm
    monkeypatch.setattr(blocks, "rms_norm", lambda x, weight, eps, fused=False: original(x, weight + 1, eps, fused))


def heads_permuted(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    original = blocks._attention_core
    monkeypatch.setattr(blocks, "_attention_core", lambda *arguments: original(*arguments).roll(1, dims=1))


def stale_cache_block(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second block of the longest prompt holds what stands in its first one."""
    original = NativeEngine._decode

    def decode(engine: NativeEngine) -> None:
        size = engine.pool.size
        blocks = max((sequence.blocks for sequence in engine.scheduler.running), key=len, default=[0, 0])
        first, other = blocks[1] * size, blocks[0] * size
        for store in (engine.cache.keys, engine.cache.values):
            store[:, first : first + size] = store[:, other : other + size].clone()
        original(engine)

    monkeypatch.setattr(NativeEngine, "_decode", decode)


# What is wrong, and where the learner and the engine say that it begins.
FAULTS: dict[str, tuple[Fault, str]] = {
    "rotation off by one": (rotation_off_by_one, "it begins in rotary_emb"),
    "wrong rope base": (wrong_rope_base, "it begins in rotary_emb"),
    "a window on one side only": (window_on_one_side_only, "it begins in layers.0.self_attn"),
    "soft-capped logits": (soft_capped_logits, "it begins in its head"),
    "a norm with one more": (norm_with_one_more, "it begins in layers.0.input_layernorm"),
    "heads permuted": (heads_permuted, "it begins in layers.0.self_attn"),
}
ENGINE_FAULTS: dict[str, Fault] = {
    "a stale block of the cache": stale_cache_block,
    "rotation off by one": rotation_off_by_one,
    "wrong rope base": wrong_rope_base,
    "a window on one side only": window_on_one_side_only,
    "soft-capped logits": soft_capped_logits,
    "a norm with one more": norm_with_one_more,
    "heads permuted": heads_permuted,
}
