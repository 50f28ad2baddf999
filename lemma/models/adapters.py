"""LoRA adapters inside the joint products of an engine.

The first factors of the adapters lie below the weights that they adapt, in one tensor: the product that an engine makes
anyway then gives both. What the second factors add is small work, done by one kernel with what follows the product.
Nothing is merged. What a layer gives is rounded before it is added to the residual stream, as it is in the learner.

Shapes: T tokens, I width of the input, O of all outputs, R of all first factors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from lemma.models.products import Product, are_joint, as_product, gated

# Layers of a decoder block that read the same input, by the part of the block that holds them.
GROUPS = {
    "self_attn": (("q_proj", "k_proj", "v_proj"), ("o_proj",)),
    "mlp": (("gate_proj", "up_proj"), ("down_proj",)),
}
MOST_PARTS = 3
# Rows of a product begin at multiples of so many numbers: attention reads 16 bytes at a time.
ALIGNMENT = 8


class Folded(NamedTuple):
    """The weights of some layers and, below them, the first factors of their adapters; the layers' biases, then zeros.

    All of these adapters have one rank and one scale. Below them are zeros, as far as alignment needs them.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    products: list[Product]
    rank: int

    @property
    def scale(self) -> float:
        return self.products[0].scale

    @property
    def widths(self) -> list[int]:
        return [len(product.weight) for product in self.products]

    @property
    def ups(self) -> list[torch.Tensor]:
        return [product.up for product in self.products if product.up is not None]

    @property
    def is_for_kernels(self) -> bool:
        """Whether kernels divide the outputs evenly, and have room for the rank."""
        from lemma.models.adapter_kernels import COLUMNS, largest_rank

        return all(width % COLUMNS == 0 for width in self.widths) and self.rank <= largest_rank(self.weight.dtype)

    def multiplied(self, x_TI: torch.Tensor) -> torch.Tensor:
        """What the layers give without adapters, and the adapters' inner values beside it: (T, O + R)."""
        return F.linear(x_TI, self.weight, self.bias)

    def inner(self, joint_TX: torch.Tensor) -> Sequence[torch.Tensor]:
        wide = sum(self.widths)
        return joint_TX[:, wide : wide + self.rank * len(self.products)].split(self.rank, dim=-1)

    def outputs(self, x_TI: torch.Tensor, fused: bool) -> Sequence[torch.Tensor]:
        """What the layers give."""
        joint = self.multiplied(x_TI)
        parts = joint[:, : sum(self.widths)].split(self.widths, dim=-1)
        if fused and self.is_for_kernels:
            from lemma.models.adapter_kernels import adapt_

            adapt_(joint, self.ups, self.rank, self.scale, None)
            return parts
        for part, inner, up in zip(parts, self.inner(joint), self.ups, strict=True):
            part.addmm_(inner, up.T, alpha=self.scale)
        return parts

    def add_to(self, target_TO: torch.Tensor, x_TI: torch.Tensor, fused: bool) -> torch.Tensor:
        """target += layer(x), in place, for a single layer."""
        joint = self.multiplied(x_TI)
        if fused and self.is_for_kernels:
            from lemma.models.adapter_kernels import adapt_

            adapt_(joint, self.ups, self.rank, self.scale, target_TO)
            return target_TO
        (inner,) = self.inner(joint)
        target_TO.add_(joint[:, : self.widths[0]])
        return target_TO.addmm_(inner, self.ups[0].T, alpha=self.scale)

    def gated(self, x_TI: torch.Tensor, fused: bool) -> torch.Tensor:
        """silu(gate) * up of a feed-forward layer's two projections."""
        if fused and self.is_for_kernels:
            from lemma.models.adapter_kernels import gate_adapted

            return gate_adapted(self.multiplied(x_TI), self.ups, self.rank, self.scale)
        gate, up = self.outputs(x_TI, False)
        return gated(gate, up, fused)


def fold_adapters(model: nn.Module) -> int:
    """Lay first factors below the weights that they adapt, in blocks that ask for them; how many tensors there are.

    Parameters stay what they are, as views: the learner and files see nothing of it.
    """
    count = 0
    for block in model.modules():
        for holder, groups in GROUPS.items() if "lemma_folded" in block.__dict__ else ():
            part = getattr(block, holder, None)
            if not isinstance(part, nn.Module):
                continue
            for names in groups:
                layers = [getattr(part, name, None) for name in names]
                if all(isinstance(layer, nn.Module) for layer in layers):
                    count += _fold(part, names, [layer for layer in layers if layer is not None])
    return count


def _fold(part: nn.Module, names: tuple[str, ...], layers: Sequence[nn.Module]) -> bool:
    products = [product for product in map(as_product, layers) if product is not None]
    known: dict[tuple[str, ...], tuple[torch.Tensor, torch.Tensor | None]] = getattr(part, "lemma_folded", {})
    if len(products) < len(layers) or not _are_alike(products):
        known.pop(names, None)
        return False
    if names in known and _holds(*known[names], products):
        return True
    downs = [product.down for product in products if product.down is not None]
    wide = sum(len(product.weight) for product in products)
    rows = -(-(wide + sum(map(len, downs))) // ALIGNMENT) * ALIGNMENT
    weight = _laid_out([*(product.weight for product in products), *downs], rows)
    biases = [product.bias for product in products if product.bias is not None]
    bias = _laid_out(biases, rows) if biases else None
    if len(layers) > 1:
        part.lemma_joint = (weight[:wide], None if bias is None else bias[:wide])
    part.lemma_folded = known | {names: (weight, bias)}
    return True


def _laid_out(parameters: Sequence[torch.Tensor], rows: int) -> torch.Tensor:
    """These, one below the other and with zeros below them, in a tensor that they are views of from now on."""
    whole = parameters[0].data.new_zeros(rows, *parameters[0].shape[1:])
    place = 0
    for parameter in parameters:
        piece = whole[place : place + len(parameter)]
        piece.copy_(parameter.data)
        parameter.data, place = piece, place + len(parameter)
    return whole


def _are_alike(products: Sequence[Product]) -> bool:
    """Whether all have adapters of one rank and scale, none of them DoRA, and all or none a bias."""
    kinds = {
        (None if product.down is None else product.down.shape, product.scale, product.bias is None)
        for product in products
    }
    is_plain = all(product.rows_O is None for product in products)
    return is_plain and len(kinds) == 1 and products[0].down is not None and len(products) <= MOST_PARTS


def _holds(weight: torch.Tensor, bias: torch.Tensor | None, products: Sequence[Product]) -> bool:
    """Whether weights, biases and first factors still lie where they were put: none was moved."""
    place = weight.data_ptr() + sum(product.weight.nbytes for product in products)
    for product in products:
        if product.down is None or product.down.data_ptr() != place:
            return False
        place += product.down.nbytes
    return are_joint(products, weight, bias)


def folded(part: nn.Module, names: tuple[str, ...]) -> Folded | None:
    """What an engine multiplies by for these layers, where their adapters are folded and still are as they were."""
    known: dict[tuple[str, ...], tuple[torch.Tensor, torch.Tensor | None]] = getattr(part, "lemma_folded", {})
    tensors = known.get(names)
    if tensors is None or torch.is_grad_enabled() or part.training:
        return None
    products = [product for product in (as_product(getattr(part, name)) for name in names) if product is not None]
    if len(products) < len(names) or not _are_alike(products) or not _holds(*tensors, products):
        return None
    assert products[0].down is not None
    return Folded(*tensors, products, len(products[0].down))


@torch.no_grad()
def note_rows(model: nn.Module) -> None:
    """Note on every DoRA layer what its rows are multiplied by while its weights stay as they are: the lengths that are
    trained over those of the weight with its adapter, as peft computes them at every call. An engine calls this when
    weights have changed; the tensors keep their addresses."""
    for layer in model.modules():
        lengths = getattr(layer, "lora_magnitude_vector", None)
        base: Any = getattr(layer, "base_layer", None)
        if not lengths or len(lengths) > 1 or type(base) is not nn.Linear or hasattr(base.weight, "full_tensor"):
            continue
        ((name, length),) = lengths.items()
        down, up = layer.lora_A[name].weight, layer.lora_B[name].weight
        rows_O = length.weight / length.get_weight_norm(base.weight, up @ down, layer.scaling[name])
        kept = getattr(layer, "lemma_rows", None)
        layer.lemma_rows = rows_O if kept is None or kept.device != rows_O.device else kept.copy_(rows_O)
