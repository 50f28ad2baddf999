"""Whether all ranks have loaded the same model, in the same precision."""

from __future__ import annotations

import hashlib
import socket

import torch
from torch import nn

from lemma.core.errors import UserError
from lemma.core.ranks import gather_over_ranks
from lemma.core.roll_call import check_alike


def check_same_weights(module: nn.Module, what: str = "the weights of the model", whose: str = "") -> None:
    """Refuse a model of which this rank has other weights than the first one. They are known by sums of bits."""
    _check_kinds(module)
    sums = [_sum_of_bits(weight.detach()) for weight in module.parameters()]
    check_alike({what: hashlib.sha256(repr(sums).encode()).hexdigest()}, whose)


def _check_kinds(module: nn.Module) -> None:
    """Refuse ranks that compute on other kinds of devices, or in another precision."""
    weight = next(module.parameters())
    mine = f"on {weight.device.type} in {str(weight.dtype).removeprefix('torch.')}"
    everybody = gather_over_ranks((socket.gethostname(), mine), "where ranks compute")
    first, theirs = everybody[0]
    for number, (host, own) in enumerate(everybody):
        if own != theirs:
            raise UserError(
                f"rank {number} on {host} computes {own}, and rank 0 on {first} {theirs}",
                fix="name a device that all machines have: `--device`, or `run.device` of a recipe",
            )


def _sum_of_bits(weight: torch.Tensor) -> tuple[int, int]:
    """Eight bytes at a time, so that hardly anything is copied; and the bytes that are left."""
    flat = weight.contiguous().view(-1).view(torch.uint8)
    if flat.storage_offset() % 8:  # a part of a joint weight
        flat = flat.clone()
    whole = len(flat) // 8 * 8
    return int(flat[:whole].view(torch.int64).sum().item()), int(flat[whole:].sum(dtype=torch.int64).item())
