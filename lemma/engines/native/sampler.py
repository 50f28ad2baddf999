"""From logits to tokens: Triton kernels on a GPU, plain torch elsewhere and for what the kernels do not support.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from lemma.engines.native.noise import gumbel, row_seeds
from lemma.engines.native.sequences import Sequence
from lemma.engines.protocol import Sampling
from lemma.engines.sampling import cut, cuts_support, end_ids, exact, logprobs, penalise, scale
from lemma.models.families import LogitMap
from lemma.models.logprobs import map_logits

if TYPE_CHECKING:
    from lemma.engines.native.cuts import Cuts

# On the device from the whole vocabulary, on the device with cuts of the support, or with the host at every step.
SamplingMode = Literal["whole", "cut", "host"]
PLAIN = LogitMap()
# Maximum number of end ids per row that a kernel checks.
ENDS = 8


def draw(
    logits_BV: torch.Tensor,
    keys_B2: torch.Tensor,
    positions_B: torch.Tensor,
    inverse_B: torch.Tensor,
    noisy_B: torch.Tensor,
    fused: bool,
    logit_map: LogitMap = PLAIN,
    cuts: Cuts | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A token for each row, its log-probability at the sampling temperature, and the log of the mass that `cuts` keep.
    Only the fused kernels support cuts; without cuts a token is sampled from the whole vocabulary.

    `inverse_B` is 1 / temperature (1 for temperature 0), `noisy_B` is 0 for greedy rows. `positions_B` is the position
    that the token will have. `logits_BV` are the raw output of the head, to which the model applies `logit_map`.
    """
    if fused:
        from lemma.engines.native.sampling_kernels import sample

        return sample(logits_BV, keys_B2, positions_B, inverse_B, noisy_B, *logit_map, cuts)
    assert cuts is None
    z_BV = exact(map_logits(logits_BV, *logit_map)) * inverse_B[:, None]
    noise_BV = gumbel(row_seeds(keys_B2, positions_B), logits_BV.shape[-1]).to(z_BV.dtype)
    tokens_B = (z_BV + noise_BV * noisy_B[:, None]).argmax(-1)
    chosen_B = z_BV.gather(-1, tokens_B[:, None])[:, 0] - z_BV.logsumexp(-1)
    return tokens_B, chosen_B, torch.zeros_like(chosen_B)


def draw_cut(
    logits_BV: torch.Tensor,
    sequences: Rows[Sequence],
    keys_B2: torch.Tensor,
    positions_B: torch.Tensor,
    drawn: int,
    eos: int,
    logit_map: LogitMap = PLAIN,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Like `draw`, for rows of which some cut the support, forbid an early end or penalise repetition. `drawn` is the
    number of tokens sampled since the host last read the sequences."""
    logits_BV = map_logits(logits_BV, *logit_map)
    noise_BV = gumbel(row_seeds(keys_B2, positions_B), logits_BV.shape[-1])
    tokens = torch.empty(len(sequences), dtype=torch.int64, device=logits_BV.device)
    chosen, kept = (torch.empty(len(sequences), dtype=torch.float32, device=logits_BV.device) for _ in range(2))
    for sampling, early, rows in _by_settings(sequences, drawn):
        logits = logits_BV[rows]
        if sampling.repetition_penalty != 1.0:
            logits = torch.stack([
                penalise(exact(row), torch.as_tensor(sequences[i].seen_ids(), device=row.device),
                         sampling.repetition_penalty)
                for row, i in zip(logits, rows, strict=True)
            ])  # fmt: skip
        forbidden = [token for token in end_ids(sampling, eos) if token >= 0] if early else ()
        masked, mass = cut(logits, sampling, forbidden)
        noise = noise_BV[rows] if sampling.temperature > 0 else 0.0
        picked = (masked + noise).argmax(-1)
        tokens[rows], kept[rows] = picked, mass.float()
        chosen[rows] = logprobs(logits, picked, sampling.temperature).float()
    return tokens, chosen, kept


def _by_settings(sequences: Rows[Sequence], drawn: int) -> list[tuple[Sampling, bool, list[int]]]:
    """Rows grouped by how they are sampled: the settings, whether it is too early to end, and the rows."""
    groups: dict[tuple[Sampling, bool], list[int]] = {}
    for row, sequence in enumerate(sequences):
        sampling = sequence.request.sampling
        early = sequence.count + drawn < sampling.min_tokens
        groups.setdefault((sampling, early), []).append(row)
    return [(sampling, early, rows) for (sampling, early), rows in groups.items()]


def sampling_mode(
    sequences: Rows[Sequence], kernels: Callable[[], bool], eos: int, counts: Rows[int] | None = None
) -> SamplingMode:
    """How to sample the next tokens of these sequences. `kernels` says whether there are kernels that cut; `counts` are
    the tokens that the sequences will have by then, if not their current ones."""
    samplings, which = distinct(sequences)
    cut_or_penalised = [s.repetition_penalty != 1.0 or (cuts_support(s) and s.temperature > 0) for s in samplings]
    if not any(cut_or_penalised):
        counts = [sequence.count for sequence in sequences] if counts is None else counts
        least = np.array([sampling.min_tokens for sampling in samplings])
        if not least.any() or bool((np.array(counts) >= least[which]).all()):
            return "whole"
    plain = (s.repetition_penalty == 1.0 and not (s.min_tokens and len(end_ids(s, eos)) > ENDS) for s in samplings)
    return "cut" if all(plain) and kernels() else "host"


def temperatures(sequences: Rows[Sequence]) -> np.ndarray:
    """Two rows: 1 / temperature (1 for temperature 0), and 1 for rows with noise, 0 for greedy ones."""
    samplings, which = distinct(sequences)
    pairs = [[1.0 / scale(s.temperature) for s in samplings], [float(s.temperature > 0) for s in samplings]]
    return np.array(pairs, dtype=np.float32)[:, which]


def distinct(sequences: Rows[Sequence]) -> tuple[list[Sampling], np.ndarray]:
    """The distinct settings, and the index of each sequence's. Compared by identity: equal objects count separately."""
    samplings = [sequence.request.sampling for sequence in sequences]
    numbers: dict[int, int] = {}
    which = [numbers.setdefault(id(sampling), len(numbers)) for sampling in samplings]
    there = {id(sampling): sampling for sampling in samplings}
    return [there[name] for name in numbers], np.array(which)
