"""What may not be sampled, as kernels read it: a row of limits for each sequence. Shapes: B rows, E end ids."""

from __future__ import annotations

import math
from collections.abc import Sequence as Rows
from typing import NamedTuple

import torch

from lemma.engines.native.sampler import ENDS, distinct
from lemma.engines.native.sequences import Sequence
from lemma.engines.protocol import Sampling
from lemma.engines.sampling import end_ids


class Cuts(NamedTuple):
    """What each row may not sample: all but the `top_k` most likely tokens (0: no limit), all beyond a mass of `top_p`,
    tokens below the most likely by more than `min_p` (as a log), and `ends_BE` at positions before `until_B`."""

    top_k_B: torch.Tensor
    top_p_B: torch.Tensor
    min_p_B: torch.Tensor
    until_B: torch.Tensor
    ends_BE: torch.Tensor

    @classmethod
    def empty(cls, rows: int, device: torch.device) -> Cuts:
        zeros = torch.zeros(rows, dtype=torch.int64, device=device)
        reals = torch.zeros(2, rows, dtype=torch.float32, device=device)
        ends = torch.full((rows, ENDS), -1, dtype=torch.int64, device=device)
        return cls(zeros, reals[0].fill_(1.0), reals[1].fill_(float("-inf")), zeros.clone(), ends)

    @classmethod
    def of(cls, sequences: Rows[Sequence], eos: int) -> Cuts:
        """On the host. A temperature of 0 cuts nothing. End ids beyond `ENDS` are left out: the kernels are never used
        for such a row while it may not end."""
        samplings, which = distinct(sequences)
        limits = cls.empty(len(samplings), torch.device("cpu"))
        for row, sampling in enumerate(samplings):
            limits.limit(row, sampling)
            if sampling.min_tokens:
                ends = [token for token in end_ids(sampling, eos) if token >= 0][:ENDS]
                limits.ends_BE[row, : len(ends)] = torch.tensor(ends, dtype=torch.int64)
        cuts = cls(*(torch.from_numpy(values.numpy()[which]) for values in limits))
        if any(sampling.min_tokens for sampling in samplings):
            until = [_earliest_end(sequence) for sequence in sequences]
            cuts.until_B.copy_(torch.tensor(until, dtype=torch.int64))
        return cuts

    def limit(self, row: int, sampling: Sampling) -> None:
        """Set the top-k, top-p and min-p of a row, unless its temperature is 0."""
        if sampling.temperature > 0:
            self.top_k_B[row] = sampling.top_k
            self.top_p_B[row] = sampling.top_p
            self.min_p_B[row] = math.log(sampling.min_p) if sampling.min_p > 0 else float("-inf")

    def first(self, rows: int) -> Cuts:
        return Cuts(*(tensor[:rows] for tensor in self))


def _earliest_end(sequence: Sequence) -> int:
    """The first position at which it may end; 0 without `min_tokens`."""
    least = sequence.request.sampling.min_tokens
    return sequence.length - sequence.count + least if least else 0
