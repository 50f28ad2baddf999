"""A model whose weights several ranks may hold parts of; its policy and its critic compute alike then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class GatheredModel:
    """Weights are whole, unless `use_split` says what brings them together for a computation."""

    _gather: Callable[[Callable[[], Any]], Any] | None = None
    # What it computes in, where the weights themselves are wider.
    _precision: torch.dtype | None = None
    # A mask that is ready made is passed through untouched: the pack's borders take its place.
    _no_mask: torch.Tensor

    @property
    def is_split(self) -> bool:
        """Whether ranks hold parts of the weights; then all of them compute at the same time."""
        return self._gather is not None

    def use_split(
        self, gather: Callable[[Callable[[], Any]], Any], precision: torch.dtype, device: torch.device
    ) -> None:
        """From now on the weights are split; `gather` brings them together for a computation."""
        self._gather, self._precision, self._no_mask = gather, precision, self._no_mask.to(device)

    def _computed(self, compute: Callable[[], T]) -> T:
        """What this gives while the weights can be read."""
        return compute() if self._gather is None else self._gather(compute)
