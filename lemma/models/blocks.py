"""The small functions of a decoder block that Lemma computes itself: RMS norm and the gated feed-forward.

They are installed on the modules once, with their backward, for everything that uses the model. On a GPU they are
fused kernels; elsewhere plain torch, in at least float32 and in float64 where the model is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType

import torch
import torch.nn.functional as F
from torch import nn

PROJECTIONS = ("gate_proj", "up_proj", "down_proj", "act_fn")
SILU = ("SiLU", "SiLUActivation")


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


def _norm_forward(self: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    fused = self.lemma_fused and hidden_states.is_cuda
    return rms_norm(hidden_states, self.weight, self.variance_epsilon, fused)


def _feed_forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return self.down_proj(gated(self.gate_proj(x), self.up_proj(x), self.lemma_fused and x.is_cuda))


def install(model: nn.Module, fused: bool = True) -> int:
    """Replace the forwards of known norms and feed-forwards on these instances; the number of modules changed.

    Norms are recognised by their shape (`weight` and `variance_epsilon`, which Gemma's 1 + weight norms do not have),
    feed-forwards by their three projections and a SiLU.
    """
    changed = 0
    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm") and hasattr(module, "variance_epsilon") and hasattr(module, "weight"):
            module.forward = MethodType(_norm_forward, module)
        elif all(hasattr(module, name) for name in PROJECTIONS) and type(module.act_fn).__name__ in SILU:
            module.forward = MethodType(_feed_forward, module)
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
