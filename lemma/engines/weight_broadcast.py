"""Weights from learner ranks to speakers: broadcast in buckets through one buffer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lemma.models.policy import Policy

BUCKET_BYTES = 2**26
# Alignment of a part in its bucket.
STEP_BYTES = 16

# Names, shapes and dtypes of the weights.
Layout = Sequence[tuple[str, tuple[int, ...], str]]


@dataclass(frozen=True)
class WeightPart:
    """`count` numbers of a flat tensor from `start` on, and their offset in the bucket in bytes."""

    name: str
    dtype: torch.dtype
    start: int
    count: int
    offset: int


def layout_of(policy: Policy) -> Layout:
    """What is sent: the trained weights, in the policy's compute dtype."""
    return [(name, tuple(p.shape), _sent_type(policy, p)) for name, p in policy.parameters().items()]


def _sent_type(policy: Policy, parameter: torch.Tensor) -> str:
    """Sharded weights are masters, which may be wider than the compute dtype."""
    dtype = policy.dtype if hasattr(parameter, "full_tensor") else parameter.dtype
    return str(dtype).removeprefix("torch.")


def buckets_of(layout: Layout) -> Iterator[list[WeightPart]]:
    """The weights in order, split into parts that fill bucket after bucket."""
    bucket: list[WeightPart] = []
    filled = 0
    for name, shape, type_name in layout:
        dtype = getattr(torch, type_name)
        start, end = 0, math.prod(shape)
        while start < end:
            count = min(end - start, (BUCKET_BYTES - filled) // dtype.itemsize)
            if count == 0:
                yield bucket
                bucket, filled = [], 0
                continue
            bucket.append(WeightPart(name, dtype, start, count, filled))
            start += count
            filled = -(-(filled + count * dtype.itemsize) // STEP_BYTES) * STEP_BYTES
    if bucket:
        yield bucket


@torch.no_grad()
def send(policy: Policy, carrier: Any, on_device: bool) -> None:
    """Broadcast from the first rank of the carrier's group. If the weights are sharded, all learner ranks call this
    together; those without a carrier send nothing."""
    parameters, layout = policy.parameters(), layout_of(policy)
    is_split = any(hasattr(parameter, "full_tensor") for parameter in parameters.values())
    if carrier is None and not is_split:
        return
    buffer = _Buffer(layout, policy.device if on_device else torch.device("cpu"))
    name, flat = "", torch.empty(0)
    for bucket in buckets_of(layout):
        for part in bucket:
            if part.name != name:
                name, flat = part.name, _whole(parameters[part.name].detach(), part.dtype).reshape(-1)
            if carrier is not None:
                buffer.slot(part).copy_(flat[part.start : part.start + part.count])
        if carrier is not None:
            buffer.broadcast(bucket, carrier)


def _whole(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The full tensor, gathered if it is sharded; shards may be kept in fp32."""
    return tensor.to(dtype).full_tensor() if hasattr(tensor, "full_tensor") else tensor


@torch.no_grad()
def take(policy: Policy, layout: Layout, carrier: Any, on_device: bool) -> None:
    """Overwrite the policy's weights in place with what the first rank of the carrier's group sends."""
    parameters = policy.parameters()
    buffer = _Buffer(layout, policy.device if on_device else torch.device("cpu"))
    for bucket in buckets_of(layout):
        buffer.broadcast(bucket, carrier)
        for part in bucket:
            flat = parameters[part.name].detach().view(-1)
            flat[part.start : part.start + part.count].copy_(buffer.slot(part))


class _Buffer:
    """Memory for one bucket, reused for all of them."""

    def __init__(self, layout: Layout, device: torch.device):
        size = max((_bytes(bucket) for bucket in buckets_of(layout)), default=0)
        self._bytes = torch.empty(size, dtype=torch.uint8, device=device)

    def slot(self, part: WeightPart) -> torch.Tensor:
        return self._bytes[part.offset : part.offset + part.count * part.dtype.itemsize].view(part.dtype)

    def broadcast(self, bucket: Sequence[WeightPart], carrier: Any) -> None:
        import torch.distributed as dist

        dist.broadcast(self._bytes[: _bytes(bucket)], group_src=0, group=carrier)


def _bytes(bucket: Sequence[WeightPart]) -> int:
    last = bucket[-1]
    return last.offset + last.count * last.dtype.itemsize
