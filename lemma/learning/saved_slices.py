"""What a checkpoint holds of every parameter: whole, or in contiguous slices of it laid flat, however they were cut.

`weight/NAME@START` is a slice of a master, `optimiser/NAME/KEY@START` what the optimiser keeps for it; without a mark
it is the whole parameter. Ranks cut by pieces or, where weights are split, by rows; whoever reads cuts as it likes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from lemma.core.errors import UserError
from lemma.learning.parameter_pieces import ParameterPiece


@dataclass
class _Slice:
    """Part of a parameter, as it was saved, and what the optimiser kept for it."""

    start: int
    weight: torch.Tensor
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def stop(self) -> int:
        return self.start + self.weight.numel()


class SavedSlices:
    """The tensors of a checkpoint, and `plain`, what the optimiser keeps that is no tensor."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], plain: Mapping[str, Any]):
        self._slices: dict[str, dict[int, _Slice]] = {}
        self._whole_shapes: dict[str, torch.Size] = {}
        for key, tensor in tensors.items():
            if key.startswith("weight/"):
                name, start = _place(key.removeprefix("weight/"))
                self._slices.setdefault(name, {})[start] = _Slice(start, tensor)
                if "@" not in key:
                    self._whole_shapes[name] = tensor.shape
        moments = {key.removeprefix("optimiser/"): t for key, t in tensors.items() if key.startswith("optimiser/")}
        for key, kept in (*moments.items(), *plain.items()):
            path, start = _place(key)
            name, _, label = path.rpartition("/")
            if start in self._slices.get(name, {}):
                self._slices[name][start].kept[label] = kept

    def check(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Refuse a state of another model."""
        for name, parameter in parameters.items():
            there = self._difference(name, parameter)
            if there is not None:
                raise UserError(
                    f"the checkpoint is of another model: {name} is {tuple(parameter.shape)} here and {there} there",
                    fix="start over with --fresh, or give the run another folder",
                )

    def _difference(self, name: str, parameter: torch.Tensor) -> str | None:
        if name not in self._slices:
            return "no such tensor"
        shape = self._whole_shapes.get(name)
        if shape is not None:
            return None if shape == parameter.shape else f"shape {tuple(shape)}"
        end = 0
        for part in self._in_order(name):
            if part.start != end:
                return f"without its numbers from {end} on"
            end = part.stop
        return None if end == parameter.numel() else f"{end} numbers"

    def _in_order(self, name: str) -> list[_Slice]:
        return sorted(self._slices[name].values(), key=lambda part: part.start)

    def weight(self, piece: ParameterPiece) -> torch.Tensor:
        """A piece of a master, flat."""
        return _cut([(part, part.weight) for part in self._in_order(piece.name)], piece)

    def state(self, piece: ParameterPiece) -> dict[str, Any]:
        """What the optimiser kept for a piece: numbers for each weight are cut as it is, others hold for all of it."""
        parts = [part for part in self._in_order(piece.name) if part.start < piece.stop and part.stop > piece.start]
        if not parts:
            return {}
        if len(parts) == 1 and (parts[0].start, parts[0].stop) == (piece.start, piece.stop):
            return parts[0].kept
        state: dict[str, Any] = {}
        for label, kept in parts[0].kept.items():
            if not isinstance(kept, torch.Tensor) or not kept.ndim:
                state[label] = kept
            elif kept.is_floating_point() and kept.numel() == parts[0].weight.numel():
                state[label] = _cut([(part, part.kept[label]) for part in parts], piece)
            else:
                raise UserError(
                    "a checkpoint with 8-bit moments goes on only where weights are cut as they were",
                    fix="keep `cluster.shard` as it was",
                )
        return state


def _cut(parts: Iterable[tuple[_Slice, torch.Tensor]], piece: ParameterPiece) -> torch.Tensor:
    """A piece, flat, from the slices that it lies in."""
    cut = [
        tensor.flatten()[max(piece.start, part.start) - part.start : min(piece.stop, part.stop) - part.start]
        for part, tensor in parts
        if part.start < piece.stop and part.stop > piece.start
    ]
    return cut[0] if len(cut) == 1 else torch.cat(cut) if cut else torch.empty(0)


def _place(key: str) -> tuple[str, int]:
    name, _, start = key.partition("@")
    return name, int(start or 0)
