"""The optimiser of weights that are split: each rank updates its own rows, which are masters and weights in one."""

from __future__ import annotations

from typing import Any

import torch

from lemma.core.ranks import gather_over_ranks, rank, world_size
from lemma.learning.learning_options import OptimOptions
from lemma.learning.loss_scaler import LossScaler
from lemma.learning.optimiser import Optimiser, are_finite
from lemma.learning.parameter_pieces import ParameterPiece
from lemma.learning.saved_slices import SavedSlices
from lemma.learning.weight_split import split_weights
from lemma.models.policy import PackModel


class SplitOptimiser(Optimiser):
    """Pieces are the rows of each rank. Gradients come in summed over the ranks, to where their rows are. The weights
    of the model are split from here on, if they are not yet."""

    def __init__(self, policy: PackModel, options: OptimOptions):
        split_weights(policy)
        super().__init__(policy.parameters(), options, "weights")
        self.scaler = LossScaler(policy.dtype == torch.float16)

    def _cut(self) -> list[ParameterPiece]:
        return [piece for name, parameter in self.parameters.items() for piece in _rows(name, parameter)]

    def _make_masters(self) -> None:
        for piece in self.pieces:
            if piece.home == rank():
                value = _local(self.parameters[piece.name])
                assert value.numel() == piece.size, "rows are cut as FSDP cuts them"
                self.values[piece] = value

    def end_slot(self, slot: int) -> None:
        """Gradients of all ranks' packs have been added up already."""

    def _gather(self) -> list[ParameterPiece]:
        found = []
        for piece, value in self.values.items():
            grad = self.parameters[piece.name].grad
            if grad is not None:
                value.grad = _local(grad)
                found.append(piece)
        return found

    def is_finite(self) -> bool:
        return all(gather_over_ranks(are_finite(self.values.values()), "whether all weights are finite"))

    def _publish(self) -> None:
        """The rows are the weights."""

    def take(self, piece: ParameterPiece, value: torch.Tensor | None, saved: SavedSlices) -> None:
        if value is not None:
            value.copy_(saved.weight(piece).view(value.shape))


def _rows(name: str, parameter: torch.Tensor) -> list[ParameterPiece]:
    """The rows of each rank: as many for each as for the first, while there are any."""
    rows, width = parameter.shape[0], parameter.numel() // max(1, parameter.shape[0])
    each = -(-rows // world_size())
    spans = [(min(rows, r * each), min(rows, (r + 1) * each)) for r in range(world_size())]
    return [
        ParameterPiece(name, start * width, stop * width, home, stop - start == rows, parameter.ndim >= 2)
        for home, (start, stop) in enumerate(spans)
        if stop > start
    ]


def _local(tensor: Any) -> torch.Tensor:
    """This rank's rows of a split tensor, in place."""
    return tensor.detach().to_local()
