"""The small functions of a decoder block that Lemma computes itself: RMS norm, rotary embedding, gated feed-forward.

They are installed on the modules once, with their backward, for everything that uses the model. On a GPU they are
fused kernels; elsewhere plain torch, in at least float32 and in float64 where the model is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lemma.models.attention import CachedAttention, attend
from lemma.models.packing import Segments

PROJECTIONS = ("gate_proj", "up_proj", "down_proj", "act_fn")
SILU = ("SiLU", "SiLUActivation")
ATTENTIONS = ("Qwen2Attention", "Qwen3Attention", "LlamaAttention", "MistralAttention")


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, fused: bool = False) -> torch.Tensor:
    """weight * x / sqrt(mean(x^2) + eps), normalised in at least float32, rounded, then scaled."""
    if fused:
        from lemma.models.kernels import FusedRmsNorm

        return FusedRmsNorm.apply(x, weight, eps)
    wide = x if x.dtype == torch.float64 else x.float()
    normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normal.to(x.dtype)


def gated(gate: torch.Tensor, up: torch.Tensor, fused: bool = False) -> torch.Tensor:
    """silu(gate) * up."""
    if fused:
        from lemma.models.kernels import FusedGate

        return FusedGate.apply(gate, up)
    return F.silu(gate) * up


def rotate(
    query_THD: torch.Tensor, key_THD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor, fused: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary position embedding of queries and keys: (first, second) half -> (a cos - b sin, b cos + a sin)."""
    if fused:
        from lemma.models.kernels import FusedRotation

        return FusedRotation.apply(query_THD, cos_TD, sin_TD), FusedRotation.apply(key_THD, cos_TD, sin_TD)
    cos, sin = cos_TD[:, None], sin_TD[:, None]
    return query_THD * cos + _half_turn(query_THD) * sin, key_THD * cos + _half_turn(key_THD) * sin


def _half_turn(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _norm_forward(self: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    fused = self.lemma_fused and hidden_states.is_cuda
    return rms_norm(hidden_states, self.weight, self.variance_epsilon, fused)


def _feed_forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return self.down_proj(gated(self.gate_proj(x), self.up_proj(x), self.lemma_fused and x.is_cuda))


def _attention_forward(
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
    shape = (hidden_states.shape[1], -1, self.head_dim)
    query, key, value = (layer(hidden_states).view(shape) for layer in (self.q_proj, self.k_proj, self.v_proj))
    if hasattr(self, "q_norm"):
        query, key = self.q_norm(query), self.k_norm(key)
    cos, sin = position_embeddings[0][0], position_embeddings[1][0]
    # Mistral's window is in its configuration, Qwen's in the layer, and Llama has none.
    window = self.sliding_window if hasattr(self, "sliding_window") else getattr(self.config, "sliding_window", None)
    if cached is not None:
        out_THD = cached(self.layer_idx, query, key, value, cos, sin, self.scaling, window)
    else:
        query, key = rotate(query, key, cos, sin, self.lemma_fused and query.is_cuda)
        query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
        out_THD = attend(self, query, key, value, None, self.scaling, window, segments)[0][0]
    return self.o_proj(out_THD.flatten(1)[None]), None


def install(model: nn.Module, fused: bool = True) -> int:
    """Replace the forwards of known norms, feed-forwards and attention layers on these instances; how many it was.

    Norms are recognised by their shape (`weight` and `variance_epsilon`, which Gemma's 1 + weight norms do not have),
    feed-forwards by their three projections and a SiLU, attention layers by their class.
    """
    changed = 0
    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm") and hasattr(module, "variance_epsilon") and hasattr(module, "weight"):
            module.forward = MethodType(_norm_forward, module)
        elif all(hasattr(module, name) for name in PROJECTIONS) and type(module.act_fn).__name__ in SILU:
            module.forward = MethodType(_feed_forward, module)
        elif kind in ATTENTIONS:
            module.forward = MethodType(_attention_forward, module)
        else:
            continue
        module.lemma_fused = fused
        changed += 1
    return changed


@contextmanager
def originals(model: nn.Module) -> Iterator[None]:
    """Within `with`, the modules compute as they came."""
    replaced = {module: module.__dict__.pop("forward") for module in model.modules() if hasattr(module, "lemma_fused")}
    try:
        yield
    finally:
        for module, forward in replaced.items():
            module.forward = forward
