"""The small functions of a decoder block that Lemma computes itself: RMS norm, rotary embedding, gated feed-forward.

`installing` puts them on the modules once, with their backward, for everything that uses the model. On a GPU they are
fused kernels; elsewhere plain torch, in at least float32 and in float64 where the model is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lemma.models.adapters import folded
from lemma.models.attention import CachedAttention, attend
from lemma.models.joint_products import GatedDown, holds_joint, joint_product, single_product
from lemma.models.packing import Segments
from lemma.models.products import Product, as_product, gated, projected

QUERIES, GATES = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, fused: bool = False) -> torch.Tensor:
    """weight * x / sqrt(mean(x^2) + eps), normalised in at least float32, rounded, then scaled."""
    if fused:
        from lemma.models.kernels import FusedRmsNorm

        return FusedRmsNorm.apply(x, weight, eps)
    wide = x if x.dtype == torch.float64 else x.float()
    normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normal.to(x.dtype)


def rotate(
    query_THD: torch.Tensor, key_THD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor, fused: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary position embedding of queries and keys: (first, second) half -> (a cos - b sin, b cos + a sin)."""
    if fused:
        from lemma.models.kernels import FusedRotation

        return FusedRotation.apply(query_THD, cos_TD, sin_TD), FusedRotation.apply(key_THD, cos_TD, sin_TD)
    cos, sin = cos_TD[:, None], sin_TD[:, None]
    halves = (x.chunk(2, dim=-1) for x in (query_THD, key_THD))
    query_turned, key_turned = (torch.cat((-second, first), dim=-1) for first, second in halves)
    return query_THD * cos + query_turned * sin, key_THD * cos + key_turned * sin


def norm_forward(self: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    fused = self.lemma_fused and hidden_states.is_cuda
    return rms_norm(hidden_states, self.weight, self.variance_epsilon, fused)


def feed_forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return self.down_proj(gated(self.gate_proj(x), self.up_proj(x), self.lemma_fused and x.is_cuda))


def attention_forward(
    self: nn.Module,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None = None,
    past_key_values: Any = None,
    segments: Segments | None = None,
    cached: CachedAttention | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The attention layer of Qwen2, Qwen3, Llama and Mistral on a pack (1, T, hidden) or on an engine's cache.

    Any other call, such as transformers' `generate`, goes to the class's own forward.
    """
    if segments is None and cached is None:
        return type(self).forward(
            self, hidden_states, position_embeddings, attention_mask, past_key_values=past_key_values, **kwargs
        )
    out_THD = _attention_core(self, hidden_states, position_embeddings, segments, cached)
    return self.o_proj(out_THD.flatten(1)[None]), None


def _attention_core(
    self: nn.Module,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    segments: Segments | None,
    cached: CachedAttention | None,
) -> torch.Tensor:
    """Projections, rotation and attention; what the output projection gets, (T, H, D)."""
    adapted = folded(self, QUERIES) if cached is not None and self.lemma_folded else None
    if adapted is not None:
        fused = self.lemma_fused and hidden_states.is_cuda
        parts = adapted.outputs(hidden_states.flatten(0, -2), fused)
    else:
        layers = (self.q_proj, self.k_proj, self.v_proj)
        # The learner has a product of its own for each: what it scores before an update is what the update finds, to
        # the last bit. A wider product may add in another order.
        parts = [layer(hidden_states) for layer in layers] if cached is None else projected(self, layers, hidden_states)
    return _attended(self, parts, position_embeddings, segments, cached)


def _attended(
    self: nn.Module,
    parts: Sequence[torch.Tensor],
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    segments: Segments | None,
    cached: CachedAttention | None,
) -> torch.Tensor:
    """Rotation and attention of projected queries, keys and values."""
    query, key, value = (part.view(part.shape[-2], -1, self.head_dim) for part in parts)
    if hasattr(self, "q_norm"):
        query, key = self.q_norm(query), self.k_norm(key)
        if torch.is_grad_enabled():
            # The norms keep copies of the other two parts: a view would keep all three alive once more.
            value = value.contiguous()
    cos, sin = position_embeddings[0][0], position_embeddings[1][0]
    window = self.lemma_window
    if cached is not None:
        return cached(self.layer_idx, query, key, value, cos, sin, self.scaling, window)
    query, key = rotate(query, key, cos, sin, self.lemma_fused and query.is_cuda)
    query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
    return attend(self, query, key, value, None, self.scaling, window, segments)[0].squeeze(0)


def block_forward(
    self: nn.Module,
    hidden_states: torch.Tensor,
    *args: Any,
    position_embeddings: Any = None,
    segments: Segments | None = None,
    cached: CachedAttention | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """A decoder block for an engine or, with joint products, for the learner. Otherwise the class's own."""
    if cached is not None and "lemma_fused" in self.mlp.__dict__:
        outer, down = as_product(self.self_attn.o_proj), as_product(self.mlp.down_proj)
        if outer is not None and down is not None:
            return _for_engine(self, hidden_states, position_embeddings, cached, outer, down)
    if segments is not None and self.lemma_jointly and not torch.compiler.is_compiling() and _is_plain(self):
        return _learnt(self, hidden_states, position_embeddings, segments)
    return type(self).forward(
        self, hidden_states, *args, position_embeddings=position_embeddings, segments=segments, cached=cached, **kwargs
    )


def _for_engine(
    self: nn.Module,
    hidden_states: torch.Tensor,
    position_embeddings: Any,
    cached: CachedAttention,
    outer: Product,
    down: Product,
) -> torch.Tensor:
    """A block for an engine: the residual sums are part of the matrix products. Nobody else holds the residual stream
    of an engine's pass, so the sums go into it in place."""
    attention, feed_forward = self.self_attn, self.mlp
    normal = self.input_layernorm(hidden_states)
    out_THD = _attention_core(attention, normal, position_embeddings, None, cached)
    adapted = folded(attention, ("o_proj",)) if attention.lemma_folded else None
    fused = self.lemma_fused and out_THD.is_cuda
    if adapted is None:
        hidden = outer.add_to(hidden_states[0], out_THD.flatten(1))
    else:
        hidden = adapted.add_to(hidden_states[0], out_THD.flatten(1), fused)
    normal = self.post_attention_layernorm(hidden)
    adapted = folded(feed_forward, GATES) if feed_forward.lemma_folded else None
    if adapted is None:
        gate, up = projected(feed_forward, (feed_forward.gate_proj, feed_forward.up_proj), normal)
        inner = gated(gate, up, fused)
    else:
        inner = adapted.gated(normal, fused)
    adapted = folded(feed_forward, ("down_proj",)) if feed_forward.lemma_folded else None
    return (down.add_to(hidden, inner) if adapted is None else adapted.add_to(hidden, inner, fused))[None]


def _is_plain(self: nn.Module) -> bool:
    """Whether a block is made of plain linear layers whose weights are joint: no adapters, nothing moved."""
    attention, feed_forward = self.self_attn, self.mlp
    return (
        type(attention.o_proj) is nn.Linear
        and type(feed_forward.down_proj) is nn.Linear
        and feed_forward.down_proj.bias is None
        and holds_joint(attention, (attention.q_proj, attention.k_proj, attention.v_proj))
        and holds_joint(feed_forward, (feed_forward.gate_proj, feed_forward.up_proj))
    )


def _learnt(self: nn.Module, hidden_states: torch.Tensor, position_embeddings: Any, segments: Segments) -> torch.Tensor:
    """A block for the learner, with a gradient and without: one product for layers that read the same input."""
    attention, feed_forward = self.self_attn, self.mlp
    hidden, normal = _add_norm(self.input_layernorm, hidden_states.squeeze(0), None)
    layers = (attention.q_proj, attention.k_proj, attention.v_proj)
    joint = joint_product(attention, layers, normal)
    if self.lemma_fused and joint.is_cuda and not hasattr(attention, "q_norm"):
        out_THD = _attended_jointly(attention, joint, position_embeddings, segments)
    else:
        parts = joint.split([len(layer.weight) for layer in layers], dim=-1)
        out_THD = _attended(attention, parts, position_embeddings, segments, None)
    branch = single_product(attention.o_proj, out_THD.flatten(1))
    hidden, normal = _add_norm(self.post_attention_layernorm, hidden, branch)
    joint = joint_product(feed_forward, (feed_forward.gate_proj, feed_forward.up_proj), normal)
    return (hidden + GatedDown.apply(joint, feed_forward.down_proj.weight, self.lemma_fused and joint.is_cuda))[None]


def _add_norm(norm: nn.Module, x_TH: torch.Tensor, branch_TH: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The residual stream with a branch added, and its norm."""
    if norm.lemma_fused and x_TH.is_cuda:
        from lemma.models.joint_kernels import FusedAddNorm

        return FusedAddNorm.apply(x_TH, branch_TH, norm.weight, norm.variance_epsilon)
    hidden = x_TH if branch_TH is None else x_TH + branch_TH
    return hidden, norm(hidden)


def _attended_jointly(
    self: nn.Module, joint: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], segments: Segments
) -> torch.Tensor:
    """Rotation and attention of queries, keys and values that lie side by side."""
    from lemma.models.joint_kernels import FusedSplit

    heads = tuple(len(layer.weight) // self.head_dim for layer in (self.q_proj, self.k_proj))
    cos, sin = position_embeddings[0][0], position_embeddings[1][0]
    parts = FusedSplit.apply(joint, cos, sin, heads)
    query, key, value = (x.transpose(0, 1)[None] for x in parts)
    return attend(self, query, key, value, None, self.scaling, self.lemma_window, segments)[0].squeeze(0)
