"""The small functions of a decoder block that Lemma computes itself: RMS norm, rotary embedding, gated feed-forward.

They are installed on the modules once, with their backward, for everything that uses the model. On a GPU they are
fused kernels; elsewhere plain torch, in at least float32 and in float64 where the model is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from lemma.models.attention import CachedAttention, attend
from lemma.models.packing import Segments

PROJECTIONS = ("gate_proj", "up_proj", "down_proj", "act_fn")
SILU = ("SiLU", "SiLUActivation")
FAMILIES = ("Qwen2", "Qwen3", "Llama", "Mistral")
ATTENTIONS = tuple(f"{family}Attention" for family in FAMILIES)
BLOCKS = tuple(f"{family}DecoderLayer" for family in FAMILIES)
# Decoder layers that keep the arguments of a call for themselves, and the part that needs them.
SILENT = {
    "StableLmDecoderLayer": "self_attn",
    "NemotronDecoderLayer": "self_attn",
    "Lfm2DecoderLayer": "conv",
    "Lfm2MoeDecoderLayer": "conv",
}


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
    shape = (hidden_states.shape[1], -1, self.head_dim)
    projections = (self.q_proj, self.k_proj, self.v_proj)
    project = _separate if cached is None else _projected
    query, key, value = (part.view(shape) for part in project(self, projections, hidden_states))
    if hasattr(self, "q_norm"):
        query, key = self.q_norm(query), self.k_norm(key)
    cos, sin = position_embeddings[0][0], position_embeddings[1][0]
    # Mistral's window is in its configuration, Qwen's in the layer; Llama has none, whatever its configuration says.
    holder = self.config if type(self).__name__ == "MistralAttention" else self
    window = getattr(holder, "sliding_window", None)
    if cached is not None:
        return cached(self.layer_idx, query, key, value, cos, sin, self.scaling, window)
    query, key = rotate(query, key, cos, sin, self.lemma_fused and query.is_cuda)
    query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
    return attend(self, query, key, value, None, self.scaling, window, segments)[0][0]


def _block_forward(
    self: nn.Module,
    hidden_states: torch.Tensor,
    *args: Any,
    position_embeddings: Any = None,
    cached: CachedAttention | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """A decoder block for an engine: the residual sums are part of the matrix products. Otherwise the class's own."""
    attention, feed_forward = self.self_attn, self.mlp
    outer, down = as_product(attention.o_proj), as_product(feed_forward.down_proj)
    if cached is None or outer is None or down is None:
        return type(self).forward(
            self, hidden_states, *args, position_embeddings=position_embeddings, cached=cached, **kwargs
        )
    normal = self.input_layernorm(hidden_states)
    out_THD = _attention_core(attention, normal, position_embeddings, None, cached)
    # Nobody else holds the residual stream of an engine's pass, so the sums go into it in place.
    hidden = outer.add_to(hidden_states[0], out_THD.flatten(1))
    normal = self.post_attention_layernorm(hidden)
    gate, up = _projected(feed_forward, (feed_forward.gate_proj, feed_forward.up_proj), normal)
    inner = gated(gate, up, self.lemma_fused and gate.is_cuda)
    return down.add_to(hidden, inner)[None]


def _telling_forward(self: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The class's own forward, in which one part of the layer gets what the layer does not hand on."""
    part = getattr(self, SILENT[type(self).__name__])
    forward = convolved if hasattr(part, "conv") else type(part).forward
    part.forward = partial(forward, part, segments=kwargs.get("segments"), cached=kwargs.get("cached"))
    try:
        return type(self).forward(self, *args, **kwargs)
    finally:
        del part.forward


def convolved(
    self: nn.Module,
    hidden_states: torch.Tensor,
    segments: Segments | None = None,
    cached: CachedAttention | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """The short convolution of LFM2 on a pack (1, T, hidden), within each sequence. Other calls are the class's own."""
    if segments is None:
        assert cached is None, "an engine's cache holds no state of convolutions"
        return type(self).forward(self, hidden_states, **kwargs)
    before, after, x = self.in_proj(hidden_states).chunk(3, dim=-1)
    inner = before * x
    wide = inner if inner.dtype == torch.float64 else inner.float()
    borders = segments.borders_B1.long()
    tokens = hidden_states.shape[1]
    place_T = torch.arange(tokens, device=wide.device)
    place_T = place_T - torch.repeat_interleave(borders[:-1], borders.diff(), output_size=tokens)
    weight_HK = self.conv.weight[:, 0].to(wide.dtype)
    total = wide * weight_HK[:, -1]
    for back in range(1, min(weight_HK.shape[1], tokens)):
        earlier = F.pad(wide[:, :-back], (0, 0, back, 0)) * weight_HK[:, -1 - back]
        total = total + earlier.where((place_T >= back)[:, None], 0.0)
    if self.conv.bias is not None:
        total = total + self.conv.bias.to(wide.dtype)
    return self.out_proj(after * total.to(inner.dtype))


class Product(NamedTuple):
    """A linear layer as matrix products: its own weight, and the two factors and the scale of an adapter, if any."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    down: torch.Tensor | None = None
    up: torch.Tensor | None = None
    scale: float = 0.0

    def add_to(self, target: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """target += layer(x), in place; both are (T, width)."""
        target.addmm_(x, self.weight.T)
        if self.bias is not None:
            target.add_(self.bias)
        return self.adapt(target, x)

    def adapt(self, target: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """target += what the adapter adds, in place."""
        if self.down is not None and self.up is not None:
            target.addmm_(x @ self.down.T, self.up.T, alpha=self.scale)
        return target


def as_product(layer: nn.Module) -> Product | None:
    """A layer as products, where it is a plain linear layer, or one with a single plain adapter; else None.

    Dropout is not part of it: an engine speaks in evaluation mode.
    """
    if type(layer) is nn.Linear:
        return Product(layer.weight, layer.bias)
    base: Any = getattr(layer, "base_layer", None)
    if type(base) is not nn.Linear or not hasattr(layer, "lora_A") or layer.merged:
        return None
    if layer.disable_adapters:
        return Product(base.weight, base.bias)
    names = list(layer.active_adapters)
    if len(names) != 1 or names[0] not in layer.lora_A or getattr(layer, "lora_variant", None):
        return None
    down, up = layer.lora_A[names[0]], layer.lora_B[names[0]]
    if up.bias is not None or down.weight.dtype != base.weight.dtype:
        return None
    return Product(base.weight, base.bias, down.weight, up.weight, float(layer.scaling[names[0]]))


def join_weights(module: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Lay the weights of layers that read the same input side by side in memory, so that an engine can multiply by all
    of them at once. The parameters themselves stay what they are, as views of the joint tensor."""
    if not all(type(layer) is nn.Linear for layer in layers) or len({layer.bias is None for layer in layers}) > 1:
        return
    joint: list[torch.Tensor | None] = []
    for parameters in ([layer.weight for layer in layers], [layer.bias for layer in layers]):
        if parameters[0] is None:
            joint.append(None)
            continue
        whole = torch.cat([p.data for p in parameters])
        for parameter, part in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
            parameter.data = part
        joint.append(whole)
    module.lemma_joint = tuple(joint)


def _separate(module: nn.Module, layers: Sequence[nn.Module], x: torch.Tensor) -> Sequence[torch.Tensor]:
    """The outputs of several layers on the same input, a product each.

    The learner computes so with and without a gradient: what it scores before an update is then what the update finds
    in the same packs, to the last bit. A wider product may add in another order.
    """
    return [layer(x) for layer in layers]


def _projected(module: nn.Module, layers: Sequence[nn.Module], x: torch.Tensor) -> Sequence[torch.Tensor]:
    """The same for an engine: in one product where nothing is learnt and weights are joint."""
    weight, bias = getattr(module, "lemma_joint", (None, None))
    speaks = weight is not None and not torch.is_grad_enabled() and not module.training
    products = [as_product(layer) for layer in layers] if speaks else []
    if not products or not _are_joint(products, weight, bias):
        return _separate(module, layers, x)
    outputs = F.linear(x, weight, bias).split([len(p.weight) for p in products if p is not None], dim=-1)
    for product, output in zip(products, outputs, strict=True):
        assert product is not None
        product.adapt(output.view(-1, output.shape[-1]), x.view(-1, x.shape[-1]))
    return outputs


def _are_joint(products: Sequence[Product | None], weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether every layer's own weights still are its part of the joint tensor: none was moved."""
    place = weight.data_ptr()
    bias_place = 0 if bias is None else bias.data_ptr()
    for product in products:
        if product is None or product.weight.data_ptr() != place:
            return False
        if (product.bias is None) != (bias is None):
            return False
        place += product.weight.nbytes
        if product.bias is not None:
            if product.bias.data_ptr() != bias_place:
                return False
            bias_place += product.bias.nbytes
    return True


def knows(model: nn.Module) -> bool:
    """Whether all attention layers are of classes whose windows are known here."""
    kinds = {
        type(module).__name__ for module in model.modules() if hasattr(module, "q_proj") or hasattr(module, "o_proj")
    }
    return kinds <= set(ATTENTIONS)


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
            join_weights(module, (module.gate_proj, module.up_proj))
        elif kind in ATTENTIONS:
            module.forward = MethodType(_attention_forward, module)
            join_weights(module, (module.q_proj, module.k_proj, module.v_proj))
        elif kind in BLOCKS:
            module.forward = MethodType(_block_forward, module)
        elif kind in SILENT and hasattr(module, SILENT[kind]):
            module.forward = MethodType(_telling_forward, module)
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
