"""The arithmetic of an update, and the rate of matrix products that a GPU has for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from lemma.models.gpus import GPUS

if TYPE_CHECKING:
    from lemma.models.policy import PackModel

# Dense bf16 matrix rate in FLOP/s, by a part of the device's name.
MATRIX_RATES = {gpu.device: gpu.matrix_rate for gpu in GPUS.values()}


def flops_per_row(model: PackModel) -> tuple[int, int]:
    """The arithmetic of an update on one row of a pack, in the body and in the head, which scores only some of the
    rows: 2 FLOP for each weight of a linear layer in the forward pass, as many for the gradient of what it reads and,
    where it is trained, as many for its own. Attention scores do not count, and neither does recomputation."""
    return _all_per_row(model.backbone), _all_per_row(model.head)


def _all_per_row(part: nn.Module) -> int:
    """Of all layers but those in whose place an adapter has trained ones."""
    return sum(_per_row(layer) for name, layer in part.named_modules() if "original_module" not in name)


def _per_row(layer: nn.Module) -> int:
    if not isinstance(layer, nn.Linear):
        return 0
    return layer.in_features * layer.out_features * (6 if layer.weight.requires_grad else 4)
