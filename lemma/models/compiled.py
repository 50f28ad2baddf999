"""Compiled decoder blocks for the learner, as separate callables: outside the context the modules are as they were."""

from __future__ import annotations

from types import TracebackType

import torch
from torch import nn


class CompiledBlocks:
    """Within `with`, each block's forward is its compiled twin; whoever else uses the modules never sees it."""

    def __init__(self, backbone: nn.Module):
        stacks = [module for module in backbone.modules() if isinstance(module, nn.ModuleList)]
        sizes = [sum(p.numel() for p in stack.parameters()) for stack in stacks]
        self._layers = list(stacks[sizes.index(max(sizes))])
        self._own = [layer.__dict__.get("forward") for layer in self._layers]
        self._twins = [torch.compile(layer.forward, dynamic=True) for layer in self._layers]

    def __enter__(self) -> None:
        for layer, twin in zip(self._layers, self._twins, strict=True):
            layer.forward = twin

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for layer, own in zip(self._layers, self._own, strict=True):
            if own is None:
                del layer.forward
            else:
                layer.forward = own
