"""Weights with a LoRA adapter added in."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

ADAPTER = "default"


@torch.no_grad()
def merged_weight(layer: Any, weight: torch.Tensor) -> torch.Tensor:
    """`weight` of a peft layer with what its adapter adds, computed in float32 and rounded once. With DoRA, every row
    of the sum has the length that was trained."""
    up, down = (factor[ADAPTER].weight.to(weight.device).float() for factor in (layer.lora_B, layer.lora_A))
    total = weight.float().addmm(up, down, alpha=layer.scaling[ADAPTER])
    if ADAPTER in layer.lora_magnitude_vector:
        lengths = layer.lora_magnitude_vector[ADAPTER].weight.to(weight.device).float()
        total *= (lengths / torch.linalg.vector_norm(total, dim=1))[:, None]
    return total.to(weight.dtype)


def merged_state(adapted: Any, base: Any) -> dict[str, torch.Tensor]:
    """The weights of `base`, which is the model under an adapter or another copy of it, with what the adapter adds to
    them and what was trained whole in their place; the adapted model is not touched."""
    state = {
        name.replace(".base_layer.", ".").replace(".original_module.", "."): tensor
        for name, tensor in base.state_dict().items()
        if ".lora_" not in name and ".modules_to_save." not in name
    }
    for name, layer in adapted.named_modules():
        if "modules_to_save" in layer._modules:
            trained = layer.modules_to_save[ADAPTER].state_dict()
            state |= {f"{name}.{part}": tensor for part, tensor in trained.items()}
        elif hasattr(layer, "get_delta_weight"):
            state[f"{name}.weight"] = merged_weight(layer, state[f"{name}.weight"])
    return state


def merge(adapted: Any) -> Any:
    """The model that an adapter was loaded onto, with it added in; layers that are not linear are left to peft."""
    for layer in adapted.modules():
        if hasattr(layer, "lora_B") and type(layer.get_base_layer()) is nn.Linear and _is_known(layer):
            base = layer.get_base_layer()
            base.weight.data = merged_weight(layer, base.weight.data)
            layer.merged_adapters.append(ADAPTER)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="All adapters are already merged")
        return adapted.merge_and_unload()


def _is_known(layer: Any) -> bool:
    """Whether an adapter is LoRA or DoRA without a bias."""
    kinds = {type(kind).__name__ for kind in layer.lora_variant.values()}
    return ADAPTER in layer.lora_B and layer.lora_B[ADAPTER].bias is None and kinds <= {"DoraLinearVariant"}
