"""From logits to tokens, on the device: one pass where the whole vocabulary is drawn from, plain torch where it is cut.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import torch

from lemma.engines.native.noise import gumbel, row_seeds
from lemma.engines.native.scheduler import Sequence
from lemma.engines.protocol import Sampling
from lemma.engines.sampling import cut, end_ids, logprobs, penalise, scale
from lemma.models.families import LogitMap
from lemma.models.logprobs import map_logits

PLAIN = LogitMap()


def draw(
    logits_BV: torch.Tensor,
    keys_B2: torch.Tensor,
    positions_B: torch.Tensor,
    inverse_B: torch.Tensor,
    noisy_B: torch.Tensor,
    fused: bool,
    means: LogitMap = PLAIN,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A token from the whole vocabulary for each row, and its log-probability at the sampling temperature.

    `inverse_B` is 1 / temperature (1 where that is 0), `noisy_B` 0 where the likeliest token is taken. `positions_B`
    is the place the token will have. `means` is what the model makes of its head's output, which `logits_BV` are.
    """
    if fused:
        from lemma.engines.native.engine_kernels import sample

        return sample(logits_BV, keys_B2, positions_B, inverse_B, noisy_B, *means)
    z_BV = _exact(map_logits(logits_BV, *means)) * inverse_B[:, None]
    noise_BV = gumbel(row_seeds(keys_B2, positions_B), logits_BV.shape[-1]).to(z_BV.dtype)
    tokens_B = (z_BV + noise_BV * noisy_B[:, None]).argmax(-1)
    return tokens_B, z_BV.gather(-1, tokens_B[:, None])[:, 0] - z_BV.logsumexp(-1)


def draw_cut(
    logits_BV: torch.Tensor,
    sequences: Rows[Sequence],
    keys_B2: torch.Tensor,
    positions_B: torch.Tensor,
    drawn: int,
    eos: int,
    means: LogitMap = PLAIN,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `draw`, for rows some of which cut the support, forbid an early end or punish repetition; also the log of the
    kept mass. `drawn` tokens were drawn since the host last saw the sequences."""
    logits_BV = map_logits(logits_BV, *means)
    noise_BV = gumbel(row_seeds(keys_B2, positions_B), logits_BV.shape[-1])
    tokens = torch.empty(len(sequences), dtype=torch.int64, device=logits_BV.device)
    chosen, kept = (torch.empty(len(sequences), dtype=torch.float32, device=logits_BV.device) for _ in range(2))
    for sampling, early, rows in _alike(sequences, drawn):
        logits = logits_BV[rows]
        if sampling.repetition_penalty != 1.0:
            logits = torch.stack([
                penalise(_exact(row), torch.as_tensor(sequences[i].tokens, device=row.device).unique(),
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


def _alike(sequences: Rows[Sequence], drawn: int) -> list[tuple[Sampling, bool, list[int]]]:
    """Rows that are sampled in the same way: the settings, whether it is too early to end, and the rows."""
    groups: dict[tuple[Sampling, bool], list[int]] = {}
    for row, sequence in enumerate(sequences):
        sampling = sequence.request.sampling
        early = sequence.count + drawn < sampling.min_tokens
        groups.setdefault((sampling, early), []).append(row)
    return [(sampling, early, rows) for (sampling, early), rows in groups.items()]


def is_plain(sequence: Sequence) -> bool:
    """Whether the next tokens come from the whole vocabulary."""
    sampling = sequence.request.sampling
    return (
        (not sampling.cuts_support or sampling.temperature == 0)
        and sampling.repetition_penalty == 1.0
        and sequence.count >= sampling.min_tokens
    )


def inverse_temperature(sampling: Sampling) -> float:
    return 1.0 / scale(sampling.temperature)


def _exact(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
