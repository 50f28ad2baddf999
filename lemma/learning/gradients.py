"""Sums of gradients in an order that does not depend on the number of ranks: a fixed binary tree over the slots.

A rank adds up the slots that it owns as far as the tree allows. What is left is sent to the home of each piece, which
adds it up in the order of the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from lemma.core.ranks import (
    carrier,
    carries_on_device,
    gather_over_ranks,
    rank,
    slots,
    slots_of,
    waiting_for_ranks,
    world_size,
)
from lemma.learning.parameter_pieces import ParameterPiece, bucket_share, buckets

Gradients = dict[str, torch.Tensor]
# Slots from the first number up to the second, added up.
Node = tuple[int, int]
T = TypeVar("T")


class SlotSums:
    """The gradients of this rank's slots, added up as far as the tree over all slots allows. Owns what it is given."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._sums: list[Gradients] = []

    def push(self, slot: int, grads: Gradients) -> None:
        """The gradients of the next slot; one that is absent is zero."""
        self._sums.append(grads)
        for _ in range(push_node(self.nodes, (slot, slot + 1), slots())):
            right, left = self._sums.pop(), self._sums.pop()
            self._sums.append(_added(left, right))

    @property
    def names(self) -> set[str]:
        return {name for grads in self._sums for name in grads}

    def of(self, number: int, piece: ParameterPiece) -> torch.Tensor | None:
        whole = self._sums[number].get(piece.name)
        return None if whole is None else piece.of(whole).flatten()

    def only(self) -> Gradients:
        """The sum over all slots, where this rank owns them all."""
        (sums,) = self._sums
        return sums


def _added(left: Gradients, right: Gradients) -> Gradients:
    """One that is absent counts as zeros, as it does where it is sent; that matters to -0.0 alone."""
    for name in left.keys() | right.keys():
        mine, other = left.get(name), right.get(name)
        if mine is None:
            mine, other = other, None
        assert mine is not None
        exact = mine if mine.dtype in (torch.float32, torch.float64) else mine.float()
        left[name] = exact.add_(0.0 if other is None else other)
    return left


def sum_to_homes(
    sums: SlotSums, pieces: Sequence[ParameterPiece], kinds: Mapping[str, torch.dtype], device: torch.device
) -> dict[ParameterPiece, torch.Tensor]:
    """The sum over all slots of each piece that is at home here, flat; pieces without a gradient anywhere are absent.

    `kinds` are the precisions in which the gradients of each parameter are added up.
    """
    names = set().union(*gather_over_ranks(sums.names, "the names of gradients"))
    sums_here: dict[ParameterPiece, torch.Tensor] = {}
    for dtype in dict.fromkeys(kinds.values()):
        wanted = [piece for piece in pieces if piece.name in names and kinds[piece.name] == dtype]
        for parts in buckets(wanted, world_size()) if wanted else ():
            sums_here |= _round(sums, parts, device, dtype)
    return sums_here


def _round(
    sums: SlotSums, parts: list[list[ParameterPiece]], device: torch.device, dtype: torch.dtype
) -> dict[ParameterPiece, torch.Tensor]:
    """Send every home its pieces, of each node of this rank; add up what came here.

    A home gets one copy from every rank. So that neither these nor what is sent take more than a bucket, they travel in
    windows where pieces are long.
    """
    sizes = [sum(piece.size for piece in part) for part in parts]
    mine = torch.empty(sizes[rank()], dtype=dtype, device=device)
    window = bucket_share(world_size())
    for start in range(0, max(sizes), window):
        spans = [range(min(start, size), min(start + window, size)) for size in sizes]
        whole = _window(sums, parts, spans, dtype, device)
        if whole is not None:
            mine[spans[rank()].start : spans[rank()].stop] = whole
    return dict(zip(parts[rank()], mine.split([piece.size for piece in parts[rank()]]), strict=True))


def _window(
    sums: SlotSums, parts: list[list[ParameterPiece]], spans: list[range], dtype: torch.dtype, device: torch.device
) -> torch.Tensor | None:
    """The sum over all slots of this span of what is at home here; None where nothing of it is."""
    sizes = [len(span) for span in spans]
    given = torch.zeros(len(sums.nodes) * sum(sizes), dtype=dtype, device=device)
    begin = 0
    for part, span in zip(parts, spans, strict=True):
        for number in range(len(sums.nodes)):
            _fill(given[begin : begin + len(span)], sums, number, part, span)
            begin += len(span)
    nodes = [nodes_within(slots_of(other), slots()) for other in range(world_size())]
    mine = sizes[rank()]
    taken = exchange(
        given, [len(sums.nodes) * size for size in sizes], [len(own) * mine for own in nodes], "the sum of gradients"
    )
    if not mine:
        return None
    in_order = [node for own in nodes for node in own]
    return fold(slots(), dict(zip(in_order, taken.split(mine), strict=True)), lambda left, right: left.add_(right))


def _fill(target: torch.Tensor, sums: SlotSums, number: int, part: Sequence[ParameterPiece], span: range) -> None:
    """Copy a span of these pieces' gradients, which lie one after the other; absent ones are zero already."""
    place = 0
    for piece in part:
        start, stop = max(span.start, place), min(span.stop, place + piece.size)
        if start < stop:
            grad = sums.of(number, piece)
            if grad is not None:
                target[start - span.start : stop - span.start].copy_(grad[start - place : stop - place])
        place += piece.size


def spread(tensors: Mapping[ParameterPiece, torch.Tensor], place: str) -> None:
    """Overwrite every piece by what its home has. The tensors are contiguous, and of the same kinds on all ranks."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors.values()):
        for parts in buckets([piece for piece in tensors if tensors[piece].dtype == dtype], world_size()):
            for home, part in enumerate(parts):
                if part:
                    _spread(home, [tensors[piece] for piece in part], place)


def _spread(home: int, tensors: Sequence[torch.Tensor], place: str) -> None:
    if len(tensors) == 1 and tensors[0].ndim:
        broadcast(tensors[0], home, place)
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    broadcast(flat, home, place)
    if rank() != home:
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.view(-1).copy_(part)


# --- the tree ------------------------------------------------------------------------------------------------------


def halves(node: Node) -> tuple[Node, Node]:
    """The two nodes below one that spans several slots."""
    middle = (node[0] + node[1]) // 2
    return (node[0], middle), (middle, node[1])


def is_node(node: Node, count: int) -> bool:
    """Whether these slots are added up among themselves in the tree over `count` slots."""
    at = (0, count)
    while at != node and at[1] - at[0] > 1:
        left, right = halves(at)
        at = left if node[1] <= left[1] else right
    return at == node


def nodes_within(own: range, count: int) -> list[Node]:
    """The largest nodes of the tree over `count` slots that a run of slots covers."""
    nodes: list[Node] = []
    for slot in own:
        push_node(nodes, (slot, slot + 1), count)
    return nodes


def push_node(stack: list[Node], node: Node, count: int) -> int:
    """Put the next node upon a stack and join what belongs together; how many times two became one."""
    stack.append(node)
    joins = 0
    while len(stack) > 1 and is_node((stack[-2][0], stack[-1][1]), count):
        right, left = stack.pop(), stack.pop()
        stack.append((left[0], right[1]))
        joins += 1
    return joins


def fold(count: int, parts: dict[Node, T], add: Callable[[T, T], T]) -> T:
    """The sum over all slots from sums over nodes, always in the same order."""

    def of(node: Node) -> T:
        if node in parts:
            return parts[node]
        left, right = halves(node)
        return add(of(left), of(right))

    return of((0, count))


# --- between ranks -------------------------------------------------------------------------------------------------


def exchange(given: torch.Tensor, given_sizes: Sequence[int], taken_sizes: Sequence[int], place: str) -> torch.Tensor:
    """Send a part of a flat tensor to each rank; what all ranks sent here, one after the other."""
    sent = given if carries_on_device() else given.cpu()
    taken = sent.new_empty(sum(taken_sizes))
    with waiting_for_ranks(place):
        dist.all_to_all_single(taken, sent, list(taken_sizes), list(given_sizes), group=carrier())
    return taken.to(given.device)


def broadcast(tensor: torch.Tensor, source: int, place: str) -> None:
    """Overwrite a contiguous tensor by that of the rank `source`."""
    moved = tensor if carries_on_device() else tensor.cpu()
    with waiting_for_ranks(place):
        dist.broadcast(moved.view(torch.uint8), group_src=source, group=carrier())
    if moved is not tensor:
        tensor.copy_(moved)
