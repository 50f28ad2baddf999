"""The state of an optimiser, as a checkpoint holds it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lemma.core.ranks import gather_over_ranks, rank
from lemma.learning.optimiser import Optimiser
from lemma.learning.saved_slices import SavedSlices


def optimiser_state(optimiser: Optimiser) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Weights and moments of the pieces that are at home here, by name, and what is not a tensor."""
    tensors: dict[str, torch.Tensor] = {}
    plain: dict[str, Any] = {}
    inner = optimiser.inner
    for piece, value in optimiser.values.items():
        if piece.home != rank():
            continue
        tensors[f"weight/{piece.name}{piece.mark}"] = value.detach()
        for key, kept in ({} if inner is None else inner.state.get(value, {})).items():
            if isinstance(kept, torch.Tensor):
                tensors[f"optimiser/{piece.name}/{key}{piece.mark}"] = kept
            else:
                plain[f"{piece.name}/{key}{piece.mark}"] = kept
    everything = {key: kept for part in gather_over_ranks(plain, "the state") for key, kept in part.items()}
    return tensors, {"plain": everything, "scaler": optimiser.scaler.state()}


@torch.no_grad()
def load_optimiser(optimiser: Optimiser, tensors: Mapping[str, torch.Tensor], extra: Mapping[str, Any]) -> None:
    """Put a saved state back, in place; a state of another model is refused before anything changes."""
    saved = SavedSlices(tensors, extra["plain"])
    saved.check(optimiser.parameters)
    inner = optimiser.inner
    for piece in optimiser.pieces:
        value = optimiser.values.get(piece)
        optimiser.take(piece, value, saved)
        if value is not None and inner is not None:
            inner.state.pop(value, None)
            state = saved.state(piece)
            if state:
                inner.state[value] = {key: _placed(inner, key, kept, value) for key, kept in state.items()}
    optimiser.scaler.load(extra["scaler"])


def _placed(inner: torch.optim.Optimizer, key: str, value: Any, master: torch.Tensor) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    stays = key == "step" and not inner.param_groups[0].get("fused")
    placed = value.clone() if stays else value.to(master.device, copy=True)
    return placed.view(master.shape) if placed.numel() == master.numel() and placed.ndim else placed
