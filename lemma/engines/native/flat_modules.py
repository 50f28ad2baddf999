"""All modules of a model in a flat list. A model with adapters has thousands, and every generation checks the addresses
of the weights and switches between train and eval mode several times: walking a list is faster than the module tree."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel


class Modules:
    """A snapshot of all modules of a model."""

    def __init__(self, module: nn.Module):
        self._root = module
        self._all = [module]
        # A module that is used in two places appears twice, which does no harm here.
        for one in self._all:
            self._all += [part for part in one._modules.values() if part is not None]
        self._has_plain_modes = all(_has_plain_mode(one) for one in self._all)

    def addresses(self) -> tuple[int, ...]:
        """The address of each parameter."""
        return tuple(p.data_ptr() for one in self._all for p in one._parameters.values() if p is not None)

    def train(self, is_training: bool) -> None:
        """The same as the model's own `train`."""
        if not self._has_plain_modes:
            self._root.train(is_training)
            return
        for one in self._all:
            object.__setattr__(one, "training", is_training)


def _has_plain_mode(module: nn.Module) -> bool:
    """Whether the module's `train` does nothing but set `training`."""
    train = type(module).train
    return train is nn.Module.train or (train is PreTrainedModel.train and not getattr(module, "use_kernels", False))
