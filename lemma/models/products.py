"""Linear layers as matrix products: those that read one input side by side, in one product for an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn


def gated(gate: torch.Tensor, up: torch.Tensor, fused: bool = False) -> torch.Tensor:
    """silu(gate) * up."""
    if fused:
        from lemma.models.kernels import FusedGate

        return FusedGate.apply(gate, up)
    return F.silu(gate) * up


class Product(NamedTuple):
    """A linear layer as matrix products: its own weight, and the two factors and the scale of an adapter, if any. With
    DoRA, what they give is multiplied by `rows_O` before the bias is added."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    down: torch.Tensor | None = None
    up: torch.Tensor | None = None
    scale: float = 0.0
    rows_O: torch.Tensor | None = None

    def add_to(self, target: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """target += layer(x), in place; both are (T, width)."""
        if self.rows_O is not None:
            return target.add_(self.stretch(self.adapt(x @ self.weight.T, x)))
        target.addmm_(x, self.weight.T)
        if self.bias is not None:
            target.add_(self.bias)
        return self.adapt(target, x)

    def adapt(self, target: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """target += what the adapter adds, in place."""
        if self.down is not None and self.up is not None:
            target.addmm_(x @ self.down.T, self.up.T, alpha=self.scale)
        return target

    def stretch(self, target: torch.Tensor) -> torch.Tensor:
        """What the layer gives, in place, from the product of its weight and its adapter without the bias."""
        if self.rows_O is not None:
            target.mul_(self.rows_O)
        return target if self.bias is None else target.add_(self.bias)


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
    rows_O = getattr(layer, "lemma_rows", None)
    if len(names) != 1 or names[0] not in layer.lora_A or (getattr(layer, "lora_variant", None) and rows_O is None):
        return None
    down, up = layer.lora_A[names[0]], layer.lora_B[names[0]]
    if up.bias is not None or down.weight.dtype != base.weight.dtype:
        return None
    return Product(base.weight, base.bias, down.weight, up.weight, float(layer.scaling[names[0]]), rows_O)


def projected(module: nn.Module, layers: Sequence[nn.Module], x: torch.Tensor) -> Sequence[torch.Tensor]:
    """The outputs of several layers on the same input: in one product where nothing is learnt and weights are joint."""
    weight, bias = getattr(module, "lemma_joint", (None, None))
    speaks = weight is not None and not torch.is_grad_enabled() and not module.training
    products = [as_product(layer) for layer in layers] if speaks else []
    if not products or not are_joint(products, weight, bias):
        return [layer(x) for layer in layers]
    stretched = any(product is not None and product.rows_O is not None for product in products)
    joint = F.linear(x, weight, None if stretched else bias)
    outputs = joint.split([len(p.weight) for p in products if p is not None], dim=-1)
    for product, output in zip(products, outputs, strict=True):
        assert product is not None
        product.adapt(output.view(-1, output.shape[-1]), x.view(-1, x.shape[-1]))
        if stretched:
            product.stretch(output)
    return outputs


def are_joint(products: Sequence[Product | None], weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
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
