"""Contiguous pieces of parameters: what a rank owns, sends and saves. They do not depend on the number of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

# Numbers in a piece, at most; most parameters are one.
LARGEST = 2**24
# Numbers that travel at once, at most, unless a piece is larger.
BUCKET = 2**24


@dataclass(frozen=True)
class ParameterPiece:
    """`name[start:stop]` of a flat parameter. `home` is the rank that adds up its gradient and saves it."""

    name: str
    start: int
    stop: int
    home: int
    is_whole: bool
    decays: bool

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def mark(self) -> str:
        """What stands behind its name in a checkpoint."""
        return "" if self.is_whole else f"@{self.start}"

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This part of a whole tensor, without a copy; the tensor itself where it is all of it."""
        return tensor if self.is_whole else tensor.view(-1)[self.start : self.stop]


def cut(parameters: Mapping[str, torch.Tensor], ranks: int) -> list[ParameterPiece]:
    """All pieces in the order of the parameters, each at home on the rank that has least until then."""
    spans: list[tuple[str, int, int, bool, bool]] = []
    for name, parameter in parameters.items():
        size = parameter.numel()
        for start in range(0, max(size, 1), LARGEST):
            stop = min(start + LARGEST, size)
            spans.append((name, start, stop, stop - start == size, parameter.ndim >= 2))
    homes = deal([stop - start for _, start, stop, _, _ in spans], ranks)
    return [
        ParameterPiece(n, a, b, home, whole, decays)
        for (n, a, b, whole, decays), home in zip(spans, homes, strict=True)
    ]


def deal(sizes: Sequence[int], hands: int) -> list[int]:
    """Who gets which of these: the largest first, each to whoever has least so far."""
    loads, given = [0] * hands, [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        hand = min(range(hands), key=lambda h: (loads[h], h)) if hands > 1 else 0
        given[number] = hand
        loads[hand] += sizes[number]
    return given


def bucket_share(ranks: int) -> int:
    """Numbers of one rank that travel at once, at most."""
    return max(1, BUCKET // ranks)


def buckets(pieces: Iterable[ParameterPiece], ranks: int) -> list[list[list[ParameterPiece]]]:
    """Rounds in which pieces travel: in each, some of every rank's, few enough to be sent at once."""
    by_home: list[list[list[ParameterPiece]]] = [[[]] for _ in range(ranks)]
    for piece in pieces:
        of_home = by_home[piece.home]
        if of_home[-1] and sum(one.size for one in of_home[-1]) + piece.size > bucket_share(ranks):
            of_home.append([])
        of_home[-1].append(piece)
    rounds = max(len(of_home) for of_home in by_home)
    return [[of_home[k] if k < len(of_home) else [] for of_home in by_home] for k in range(rounds)]
