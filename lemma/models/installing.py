"""Puts the forwards of `blocks` in the place of a model's own, on its modules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import MethodType

import torch
from torch import nn

from lemma.models.blocks import attention_forward, block_forward, feed_forward, norm_forward
from lemma.models.silent_layers import SILENT, telling_forward

PROJECTIONS = ("gate_proj", "up_proj", "down_proj", "act_fn")
SILU = ("SiLU", "SiLUActivation")
FAMILIES = ("Qwen2", "Qwen3", "Llama", "Mistral")
ATTENTIONS = tuple(f"{family}Attention" for family in FAMILIES)
BLOCKS = tuple(f"{family}DecoderLayer" for family in FAMILIES)


def knows(model: nn.Module) -> bool:
    """Whether all attention layers are of classes whose windows are known here."""
    kinds = {
        type(module).__name__ for module in model.modules() if hasattr(module, "q_proj") or hasattr(module, "o_proj")
    }
    return kinds <= set(ATTENTIONS)


def install(model: nn.Module, fused: bool = True, jointly: bool | None = None) -> int:
    """Replace the forwards of known norms, feed-forwards and attention layers on these instances; how many it was.

    With `jointly`, the default on a GPU, the learner multiplies by joint weights as the engine does. Norms are
    recognised by their shape (`weight` and `variance_epsilon`, which Gemma's 1 + weight norms do not have),
    feed-forwards by their three projections and a SiLU, attention layers by their class. `fused` also says whether
    attention may use FlashAttention, in attention layers of every class.
    """
    changed = 0
    jointly = next(model.parameters()).is_cuda if jointly is None else jointly
    for module in model.modules():
        kind = type(module).__name__
        module.lemma_flash = fused
        if kind.endswith("RMSNorm") and hasattr(module, "variance_epsilon") and hasattr(module, "weight"):
            module.forward = MethodType(norm_forward, module)
        elif all(hasattr(module, name) for name in PROJECTIONS) and type(module.act_fn).__name__ in SILU:
            module.forward = MethodType(feed_forward, module)
            join_weights(module, (module.gate_proj, module.up_proj))
        elif kind in ATTENTIONS:
            module.forward = MethodType(attention_forward, module)
            module.lemma_window = window_of(module)
            join_weights(module, (module.q_proj, module.k_proj, module.v_proj))
        elif kind in BLOCKS:
            module.forward = MethodType(block_forward, module)
        elif kind in SILENT and hasattr(module, SILENT[kind]):
            module.forward = MethodType(telling_forward, module)
        else:
            continue
        module.lemma_fused, module.lemma_jointly, module.lemma_folded = fused, jointly, {}
        changed += 1
    return changed


@contextmanager
def originals(model: nn.Module) -> Iterator[None]:
    """Within `with`, the modules compute as they came."""
    replaced = {module: module.__dict__.pop("forward") for module in model.modules() if "lemma_fused" in vars(module)}
    try:
        yield
    finally:
        for module, forward in replaced.items():
            module.forward = forward


def window_of(attention: nn.Module) -> int | None:
    """Mistral's is in its configuration, Qwen's in the layer; Llama has none, whatever its configuration says."""
    holder = attention.config if type(attention).__name__ == "MistralAttention" else attention
    return getattr(holder, "sliding_window", None)


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
