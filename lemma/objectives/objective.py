"""What an objective is: a pure function from per-token quantities to a loss sum and named metric sums.

Shapes: N trained tokens of a pack, B sequences in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

from lemma.core.ranks import gather_over_ranks
from lemma.core.types import Output, Scope, Trajectory

Normalise = Literal["token", "sequence", "constant"]
"""How the losses of tokens are averaged (`divisors`)."""
EPISODE_TOKENS = "episode_tokens"
"""The trajectory field that counts the trained tokens of its whole episode."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts over the whole optimisation step: all packs, all ranks. What a loss is divided by."""

    tokens: float
    sequences: float
    groups: float

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory]) -> Totals:
        tokens = sum(t.trained_tokens for t in trajectories)
        # Trajectories of one episode (there are several if its history was rewritten) count once.
        shared = [(t.group_id, t.episode) for t in trajectories if t.episode is not None]
        sequences = len(trajectories) - len(shared) + len(set(shared))
        return cls(float(tokens), float(sequences), float(len({t.group_id for t in trajectories})))


def count_episode_tokens(trajectories: Sequence[Trajectory]) -> None:
    """Give every trajectory the number of trained tokens of its whole episode, if any episode on any rank gave several.

    A collective: every rank must call it.
    """
    if not any(gather_over_ranks(any(one.episode is not None for one in trajectories))):
        return
    counts: dict[tuple[int, int], int] = {}
    for one in trajectories:
        if one.episode is not None:
            place = (one.group_id, one.episode)
            counts[place] = counts.get(place, 0) + one.trained_tokens
    for one in trajectories:
        one.fields[EPISODE_TOKENS] = float(
            one.trained_tokens if one.episode is None else counts[one.group_id, one.episode]
        )


@dataclass(frozen=True)
class LossInputs:
    """What an objective sees of one pack (of the whole batch, if its scope is `batch`).

    `outputs` are those of the model that it asked for; `sequence_N` maps tokens to sequences 0..B-1, `group_B` those to
    groups; `tokens` and `fields` are the numbers that the algorithm attached to tokens and to sequences.
    """

    outputs: Mapping[Output, torch.Tensor]
    sequence_N: torch.Tensor
    group_B: torch.Tensor
    totals: Totals
    tokens: Mapping[str, torch.Tensor] = field(default_factory=dict)
    fields: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def logprobs_N(self) -> torch.Tensor:
        return self.outputs["logprobs"]

    @property
    def entropy_N(self) -> torch.Tensor:
        return self.outputs["entropy"]

    @property
    def values_N(self) -> torch.Tensor:
        return self.outputs["values"]

    @property
    def sequences(self) -> int:
        return len(self.group_B)

    @property
    def ones_N(self) -> torch.Tensor:
        """1 for each trained token, in the precision of the outputs."""
        output = next(iter(self.outputs.values()))
        return torch.ones(len(self.sequence_N), dtype=output.dtype, device=output.device)

    def lengths_B(self) -> torch.Tensor:
        """Trained tokens of each sequence, at least 1 to avoid dividing by zero."""
        return self.per_sequence(self.ones_N).clamp(min=1)

    def episode_tokens_B(self) -> torch.Tensor:
        """Trained tokens of each sequence's whole episode, which has other sequences if history was rewritten."""
        return self.fields.get(EPISODE_TOKENS, self.lengths_B()).clamp(min=1)

    def turn_N(self) -> torch.Tensor:
        """The number of each token's turn, counted over all sequences; without turns, a sequence is one turn."""
        if "turn" not in self.tokens:
            return self.sequence_N
        both = torch.stack([self.sequence_N, self.tokens["turn"].long()])
        return torch.unique(both, dim=1, return_inverse=True)[1]

    def per_sequence(self, values_N: torch.Tensor) -> torch.Tensor:
        """Sum of a per-token quantity over each sequence."""
        zeros = torch.zeros(self.sequences, *values_N.shape[1:], dtype=values_N.dtype, device=values_N.device)
        return zeros.index_add(0, self.sequence_N, values_N)


def divisors(terms: LossInputs, normalise: Normalise, constant: float = 1.0) -> tuple[torch.Tensor | None, float]:
    """What the sum over each sequence (B,) is divided by, None where by nothing, and then the sum over all of them:

    - `token`: a mean over all trained tokens of the step;
    - `sequence`: a mean over sequences of the means over their tokens; those of one episode are one;
    - `constant`: a mean over sequences of their sums divided by a constant.
    """
    sequences = max(terms.totals.sequences, 1.0)
    if normalise == "token":
        return None, max(terms.totals.tokens, 1.0)
    return (terms.episode_tokens_B(), sequences) if normalise == "sequence" else (None, constant * sequences)


def token_weights(terms: LossInputs, normalise: Normalise, constant: float = 1.0) -> torch.Tensor:
    """The weight (N,) of each token such that a weighted sum over tokens is what `divisors` says."""
    of_sequence_B, of_all = divisors(terms, normalise, constant)
    weight_N = terms.ones_N
    if of_sequence_B is not None:
        weight_N = weight_N / of_sequence_B[terms.sequence_N]
    return weight_N / of_all


Ratio = tuple[torch.Tensor | float, torch.Tensor | float]


@dataclass(frozen=True)
class Loss:
    """`value`, summed over packs and ranks, is the loss of the step; a metric is a sum and a count, summed the same
    way; for `maxima`, the maximum over packs and ranks is taken."""

    value: torch.Tensor
    metrics: Mapping[str, Ratio] = field(default_factory=dict)
    maxima: Mapping[str, torch.Tensor] = field(default_factory=dict)


class Objective(Protocol):
    """`scope` says what must stay together: a token needs nothing, a sequence its tokens, a pair its two sequences, a
    batch everything (it is then evaluated once on all packs, and each pack is run twice). `outputs` are those of the
    model that it reads."""

    @property
    def name(self) -> str: ...
    @property
    def scope(self) -> Scope: ...
    @property
    def outputs(self) -> tuple[Output, ...]: ...
    def __call__(self, terms: LossInputs) -> Loss: ...
