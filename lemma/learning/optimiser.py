"""The optimiser: fp32 master weights under low-precision compute weights, schedules, loss scaling, and its state.

Low-precision parameters keep their addresses: after a step the masters are copied into them in place. Where several
ranks share a run, masters and moments may be dealt out among them by pieces; every rank keeps all compute weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch import nn

from lemma.core.ranks import gather_over_ranks, own_slots, rank, slots, world_size
from lemma.learning.gradients import SlotSums, spread, sum_to_homes
from lemma.learning.inner_optimiser import make_inner
from lemma.learning.learning_options import OptimOptions
from lemma.learning.loss_scaler import LossScaler
from lemma.learning.parameter_pieces import ParameterPiece, cut
from lemma.learning.saved_slices import SavedSlices
from lemma.models.joint_products import sink_of

Split = Literal["none", "optimiser", "gradients", "weights"]


def learning_rate(optim: OptimOptions, step: int, total: int) -> float:
    """The rate of step `step` (counted from 0) of `total`: linear warm-up, then the schedule down to final_lr."""
    warmup = optim.warmup if optim.warmup >= 1 else optim.warmup * total
    if step < warmup:
        return optim.lr * min(1.0, (step + 1) / warmup)
    if optim.schedule == "constant":
        return optim.lr
    progress = min(1.0, (step - warmup) / max(1.0, total - warmup))
    shape = 1.0 - progress if optim.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return optim.lr * (optim.final_lr + (1.0 - optim.final_lr) * shape)


class Optimiser:
    """AdamW or RMSprop over master weights. Gradients add up in float32 or better, slot by slot, until `step`.

    `shard` says what is dealt out over the ranks: nothing; masters and moments; or the sums of gradients too, which are
    then sent home after each round of packs, and no rank ever holds all of them in full precision.

    `masters` are those that are here whole; with one slot on one rank, `masters[name].grad` is the gradient.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], options: OptimOptions, shard: Split = "none"):
        self.options = options
        self.parameters = dict(parameters)
        self.shard: Split = shard if world_size() > 1 or shard == "gradients" else "none"
        self.pieces = self._cut()
        self.masters: dict[str, torch.Tensor] = {}
        self._buffers: dict[str, torch.Tensor] = {}
        self.values: dict[ParameterPiece, torch.Tensor] = {}
        # Of slots that are summed; None where this process has the only one.
        self._sums: SlotSums | None = None
        self._rounds: dict[ParameterPiece, torch.Tensor] = {}
        for name, parameter in self.parameters.items():
            if not _is_exact(parameter) and self.shard != "gradients":
                self._buffers[name] = torch.zeros_like(parameter, dtype=torch.float32)
                if sink_of(parameter) is None:
                    parameter.register_post_accumulate_grad_hook(_collect)
            # Joint products add their gradients there themselves. The last optimiser of a parameter has them all.
            parameter.lemma_sink = self._buffers.get(name)
        self._make_masters()
        self.scaler = LossScaler(any(p.dtype == torch.float16 for p in self.parameters.values()))
        self.inner = make_inner(self.values, options)
        # Pieces that are not their own masters.
        self._narrow = [piece for piece in self.values if not _is_exact(self.parameters[piece.name])]

    def _cut(self) -> list[ParameterPiece]:
        return cut(self.parameters, world_size())

    def _make_masters(self) -> None:
        if self.shard == "none" or world_size() == 1:
            for name, parameter in self.parameters.items():
                self.masters[name] = parameter if _is_exact(parameter) else parameter.detach().float()
                if name in self._buffers:
                    self.masters[name].grad = self._buffers[name]
        for piece in self.pieces:
            parameter = self.parameters[piece.name]
            if piece.name in self.masters:
                whole = self.masters[piece.name]
                self.values[piece] = whole if piece.is_whole else piece.of(whole.detach())
            elif self._owns(piece):
                own = parameter if _is_exact(parameter) and piece.is_whole else piece.of(parameter.detach())
                self.values[piece] = own if _is_exact(parameter) else own.float()
                if piece.is_whole:
                    self.masters[piece.name] = self.values[piece]

    def _owns(self, piece: ParameterPiece) -> bool:
        """Whether this rank updates a piece."""
        return self.shard == "none" or piece.home == rank()

    # --- gradients ---------------------------------------------------------------------------------------------

    def zero(self) -> None:
        """Forget all gradients; the buffers under low-precision parameters keep their addresses."""
        self._sums, self._rounds = None, {}
        for value in self.values.values():
            value.grad = None
        for parameter in self.parameters.values():
            parameter.grad = None
        if self._buffers:
            torch._foreach_zero_(list(self._buffers.values()))
        for name, buffer in self._buffers.items():
            if name in self.masters:
                self.masters[name].grad = buffer if self.shard == "none" else None

    @torch.no_grad()
    def end_slot(self, slot: int) -> None:
        """What has come together since the last call is the gradient of this slot."""
        if slots() == world_size() == 1 and self.shard == "none":
            return
        grads: dict[str, torch.Tensor] = {}
        more = len(own_slots()) > 1
        for name, parameter in self.parameters.items():
            if name in self._buffers:
                grads[name] = self._buffers[name].clone() if more else self._buffers[name]
                if more:
                    self._buffers[name].zero_()
            elif parameter.grad is not None:
                grads[name] = parameter.grad
                parameter.grad = None
        self._sums = self._sums or SlotSums()
        self._sums.push(slot, grads)

    @torch.no_grad()
    def end_round(self) -> None:
        """Send the gradients of this round of packs home; they are not kept elsewhere."""
        assert self.shard == "gradients"
        for piece, grad in self._at_home().items():
            if piece in self._rounds:
                self._rounds[piece].add_(grad)
            else:
                self._rounds[piece] = grad if world_size() == 1 else grad.clone()
        self._sums = None

    def _at_home(self) -> dict[ParameterPiece, torch.Tensor]:
        """The sums over all slots of the pieces that are at home here."""
        sums = self._sums or SlotSums()  # a rank may own no slot
        if world_size() == 1:
            whole = sums.only()
            exact = {name: grad if _is_exact(grad) else grad.float() for name, grad in whole.items()}
            return {piece: piece.of(exact[piece.name]) for piece in self.pieces if piece.name in exact}
        kinds = {name: p.dtype if _is_exact(p) else torch.float32 for name, p in self.parameters.items()}
        return sum_to_homes(sums, self.pieces, kinds, next(iter(self.parameters.values())).device)

    def _gather(self) -> list[ParameterPiece]:
        """Give every value that this rank updates its gradient, summed over all slots; those that have one."""
        if slots() == world_size() == 1 and self.shard == "none":
            # A whole piece is a master, which has its gradient already.
            there = {piece: self.masters[piece.name].grad for piece in self.pieces}
            for piece, grad in there.items():
                if grad is not None and not piece.is_whole:
                    self.values[piece].grad = piece.of(grad)
            return [piece for piece in self.pieces if there[piece] is not None]
        own_grads = self._rounds if self.shard == "gradients" else self._at_home()
        if self.shard == "none" and world_size() > 1:
            own_grads = self._everywhere(own_grads)
        for piece, grad in own_grads.items():
            value = self.values[piece]
            value.grad = grad if grad.shape == value.shape else grad.view(value.shape)
        return [piece for piece in self.pieces if piece in own_grads]

    def _everywhere(self, sums: Mapping[ParameterPiece, torch.Tensor]) -> dict[ParameterPiece, torch.Tensor]:
        """The sums of all pieces, on every rank."""
        homes = gather_over_ranks(
            [n for n, piece in enumerate(self.pieces) if piece in sums], "gradients that are there"
        )
        there = {self.pieces[n] for of_home in homes for n in of_home}
        everything = {
            piece: sums[piece] if piece in sums else torch.empty(piece.size, dtype=value.dtype, device=value.device)
            for piece, value in self.values.items()
            if piece in there
        }
        spread(everything, "the summed gradients")
        return everything

    # --- the update --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, rate: float) -> tuple[float, bool]:
        """Sum gradients over slots and ranks, unscale, clip, update, copy into the compute weights.

        Returns the norm of the gradient before clipping, and whether it was finite; if not, nothing is updated.
        """
        pieces = self._gather()
        grads = [grad for piece in pieces if (grad := self.values[piece].grad) is not None]
        if self.scaler.enabled and grads:
            torch._foreach_mul_(grads, 1.0 / self.scaler.scale)
        size = self._norm(pieces, grads)
        finite = math.isfinite(size)
        if self.scaler.enabled:
            self.scaler.update(finite)
        if finite:
            if grads and self.options.clip and size > self.options.clip:
                torch._foreach_mul_(grads, self.options.clip / size)
            if self.inner is not None:
                for group in self.inner.param_groups:
                    group["lr"] = rate
                self.inner.step()
            self._publish()
        self.zero()
        return size, finite

    def _norm(self, pieces: Sequence[ParameterPiece], grads: Sequence[torch.Tensor]) -> float:
        """The norm of the whole gradient, from those of its pieces, each taken at home and all in order.

        The host puts them together, on one rank as on many: a device would add in another order.
        """
        if world_size() == 1:
            norms = torch.stack(torch._foreach_norm(grads, 2.0)).to("cpu") if grads else torch.empty(0)
            return torch.linalg.vector_norm(norms, 2.0).item()
        own = [(piece, grad) for piece, grad in zip(pieces, grads, strict=True) if piece.home == rank()]
        places = {piece: number for number, piece in enumerate(self.pieces)}
        found = torch._foreach_norm([grad for _, grad in own], 2.0) if own else []
        table = {places[piece]: norm.cpu() for (piece, _), norm in zip(own, found, strict=True)}
        parts = gather_over_ranks(table, "the norm of the gradient")
        everything = {n: norm for part in parts for n, norm in part.items()}
        norms = torch.stack([everything[n] for n in sorted(everything)]) if everything else torch.empty(0)
        return torch.linalg.vector_norm(norms, 2.0).item()

    def is_finite(self) -> bool:
        """Whether every weight is, as all ranks find."""
        return are_finite(self.parameters.values())

    def _publish(self) -> None:
        """Bring what was updated into the compute weights of all ranks, in place."""
        pairs = [(piece.of(self.parameters[piece.name].data), self.values[piece]) for piece in self._narrow]
        if pairs:
            torch._foreach_copy_([part for part, _ in pairs], [value.view(part.shape) for part, value in pairs])
        if self.shard != "none" and world_size() > 1:
            spread({piece: piece.of(self.parameters[piece.name].data) for piece in self.pieces}, "the new weights")

    # --- state: see `optimiser_state` ---------------------------------------------------------------------------

    def take(self, piece: ParameterPiece, value: torch.Tensor | None, saved: SavedSlices) -> None:
        """Put a saved piece into its master, if that is here, and into the compute weights."""
        weight, part = saved.weight(piece), piece.of(self.parameters[piece.name].data)
        if value is not None:
            value.copy_(weight.view(value.shape))
        part.copy_(weight.view(part.shape))


def _is_exact(parameter: torch.Tensor) -> bool:
    """Whether a parameter is its own master."""
    return parameter.dtype in (torch.float32, torch.float64)


def _collect(parameter: torch.Tensor) -> None:
    """Move a low-precision gradient into its float32 sum as soon as it is complete, so that none is kept."""
    sink = sink_of(parameter)
    if parameter.grad is not None and sink is not None:  # no gradient where products have added all of it
        sink.add_(parameter.grad)
        parameter.grad = None


@torch.no_grad()
def are_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether every number is. Needs no memory: where one is NaN, so is the greatest of their sizes."""
    floating = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    most = [most.float() for most in torch._foreach_norm(floating, math.inf)] if floating else []
    return not most or bool(torch.stack(most).isfinite().all())
