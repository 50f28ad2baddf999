"""What torch does with all modules of a model, in one walk: a model with adapters has thousands, and each generation
asks where its weights are and changes its mode several times."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel


class Modules:
    """All modules of a model as they are now."""

    def __init__(self, module: nn.Module):
        self._root = module
        self._all = [module]
        # One that has two places comes twice, which does no harm here.
        for one in self._all:
            self._all += [part for part in one._modules.values() if part is not None]
        self._has_plain_modes = all(_has_plain_mode(one) for one in self._all)

    def addresses(self) -> tuple[int, ...]:
        """Where each parameter lies."""
        return tuple(p.data_ptr() for one in self._all for p in one._parameters.values() if p is not None)

    def train(self, is_training: bool) -> None:
        """As the model's own `train`."""
        if not self._has_plain_modes:
            self._root.train(is_training)
            return
        for one in self._all:
            object.__setattr__(one, "training", is_training)


def _has_plain_mode(module: nn.Module) -> bool:
    """Whether a change of mode does nothing but set `training`."""
    train = type(module).train
    return train is nn.Module.train or (train is PreTrainedModel.train and not getattr(module, "use_kernels", False))
