"""Products of a learner that multiplies by joint weights as an engine does, on a GPU.

Its weight gradients are added to their float32 sums inside the product (`sink`): no gradient is rounded to half
precision on the way, and none is read again to be added.

Shapes: T tokens, I width of the input, O of the output, F width of the feed-forward layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lemma.models.products import are_joint, as_product, gated

HALF = (torch.bfloat16, torch.float16)


def sink_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """Where an optimiser adds this parameter's gradients up in float32; None where autograd brings them."""
    return getattr(parameter, "lemma_sink", None)


def add_product_(sink: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """sink += left @ right, in one product with float32 sums on a GPU."""
    if left.is_cuda and left.dtype in HALF:
        torch.ops.aten.addmm.dtype_out(sink, left, right, torch.float32, out=sink)
    else:
        sink.add_(left @ right)


def _give(weight: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor | None:
    """The gradient left @ right of a weight: added to its sink, or handed to autograd where there is none."""
    sink = sink_of(weight)
    if sink is None:
        return left @ right
    add_product_(sink, left, right)
    return None


class JointLinear(torch.autograd.Function):
    """x @ joint.T + bias for layers that lie side by side in `joint`; `parts` are their weights, then their biases.

    Parameters are not saved as tensors of the graph: recomputation would hand them back without their sinks.
    """

    @staticmethod
    def forward(
        ctx: Any, x_TI: torch.Tensor, joint_OI: torch.Tensor, bias_O: torch.Tensor | None, *parts: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(x_TI)
        ctx.weights, ctx.has_bias = (joint_OI, parts), bias_O is not None
        return F.linear(x_TI, joint_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        (x_TI,) = ctx.saved_tensors
        joint_OI, parts = ctx.weights
        grad_TO = grads[0]
        weights = parts[: len(parts) // 2] if ctx.has_bias else parts
        d_x = grad_TO @ joint_OI if ctx.needs_input_grad[0] else None
        pieces = grad_TO.split([len(weight) for weight in weights], dim=-1)
        learnt = ctx.needs_input_grad[3:]
        weight_grads = [
            _give(weight, piece.T, x_TI) if wanted else None
            for weight, piece, wanted in zip(weights, pieces, learnt, strict=False)
        ]
        if ctx.has_bias:
            sums = grad_TO.sum(0).split([len(weight) for weight in weights])
            weight_grads += [
                part if wanted else None for part, wanted in zip(sums, learnt[len(weights) :], strict=True)
            ]
        return d_x, None, None, *weight_grads


class GatedDown(torch.autograd.Function):
    """(silu(gate) * up) @ weight.T, where gate and up lie side by side. The inner one is not kept but made again."""

    @staticmethod
    def forward(ctx: Any, joint_T2F: torch.Tensor, weight_OF: torch.Tensor, fused: bool) -> torch.Tensor:
        gate, up = joint_T2F.chunk(2, dim=-1)
        ctx.save_for_backward(joint_T2F)
        ctx.weight, ctx.fused = weight_OF, fused
        return gated(gate, up, fused) @ weight_OF.T

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        (joint_T2F,) = ctx.saved_tensors
        weight_OF = ctx.weight
        d_joint, inner_TF = gate_backward(grads[0] @ weight_OF, joint_T2F, ctx.fused)
        return d_joint, _give(weight_OF, grads[0].T, inner_TF) if ctx.needs_input_grad[1] else None, None


def gate_backward(grad_TF: torch.Tensor, joint_T2F: torch.Tensor, fused: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of gate and up side by side, and silu(gate) * up once more."""
    if fused:
        from lemma.models.joint_kernels import joint_gate_backward

        return joint_gate_backward(grad_TF, joint_T2F)
    wide = grad_TF.dtype if grad_TF.dtype == torch.float64 else torch.float32
    gate, up = joint_T2F.to(wide).chunk(2, dim=-1)
    grad, s = grad_TF.to(wide), torch.sigmoid(gate)
    joint = torch.cat([grad * up * (s + gate * s * (1 - s)), grad * gate * s], dim=-1)
    return joint.to(joint_T2F.dtype), (gate * s * up).to(joint_T2F.dtype)


def joint_product(module: nn.Module, layers: Sequence[nn.Module], x_TI: torch.Tensor) -> torch.Tensor:
    """The outputs of layers whose weights are joint, side by side, for the learner."""
    weight, bias = module.lemma_joint
    biases = [] if bias is None else [layer.bias for layer in layers]
    return JointLinear.apply(x_TI, weight, bias, *(layer.weight for layer in layers), *biases)


def single_product(layer: nn.Module, x_TI: torch.Tensor) -> torch.Tensor:
    """One plain linear layer, for the learner."""
    biases = [] if layer.bias is None else [layer.bias]
    return JointLinear.apply(x_TI, layer.weight, layer.bias, layer.weight, *biases)


def holds_joint(module: nn.Module, layers: Sequence[nn.Module]) -> bool:
    """Whether these are plain linear layers whose weights lie side by side, in the order given."""
    weight, bias = getattr(module, "lemma_joint", (None, None))
    return (
        weight is not None
        and are_joint([as_product(layer) for layer in layers], weight, bias)
        and all(type(layer) is nn.Linear for layer in layers)
    )
