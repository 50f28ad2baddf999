"""From logits to tokens, on the device: kernels where there is a GPU, plain torch where the support is cut elsewhere.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from collections.abc import Sequence as Rows
from typing import Literal, NamedTuple

import torch

from lemma.core.errors import LemmaWarning
from lemma.engines.native.noise import gumbel, row_seeds
from lemma.engines.native.scheduler import Sequence
from lemma.engines.protocol import Sampling
from lemma.engines.sampling import cut, end_ids, logprobs, penalise, scale
from lemma.models.families import LogitMap
from lemma.models.logprobs import map_logits

Way = Literal["whole", "cut", "host"]
PLAIN = LogitMap()
# Ids that end a completion which a kernel can look for.
ENDS = 8


class Cuts(NamedTuple):
    """What each row may not draw: all but the likeliest `top_k` (0: all may), all beyond a mass of `top_p`, what is
    less likely than the likeliest by more than `min_p` (a logarithm), and `ends_BE` at places before `until_B`."""

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
        """On the host. A temperature of 0 cuts nothing. Of more than `ENDS` ends some are left out: kernels that look
        for ends are never used for such a row."""
        cuts = cls.empty(len(sequences), torch.device("cpu"))
        for row, sequence in enumerate(sequences):
            sampling = sequence.request.sampling
            if sampling.temperature > 0:
                cuts.top_k_B[row] = sampling.top_k
                cuts.top_p_B[row] = sampling.top_p
                cuts.min_p_B[row] = math.log(sampling.min_p) if sampling.min_p > 0 else float("-inf")
            if sampling.min_tokens:
                ends = [token for token in end_ids(sampling, eos) if token >= 0][:ENDS]
                cuts.ends_BE[row, : len(ends)] = torch.tensor(ends, dtype=torch.int64)
                cuts.until_B[row] = sequence.length - sequence.count + sampling.min_tokens
        return cuts

    def first(self, rows: int) -> Cuts:
        return Cuts(*(tensor[:rows] for tensor in self))


def draw(
    logits_BV: torch.Tensor,
    keys_B2: torch.Tensor,
    positions_B: torch.Tensor,
    inverse_B: torch.Tensor,
    noisy_B: torch.Tensor,
    fused: bool,
    means: LogitMap = PLAIN,
    cuts: Cuts | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A token for each row, its log-probability at the sampling temperature, and the log of the mass that `cuts` keep,
    which are for fused kernels only; without cuts the token comes from the whole vocabulary.

    `inverse_B` is 1 / temperature (1 where that is 0), `noisy_B` 0 where the likeliest token is taken. `positions_B`
    is the place the token will have. `means` is what the model makes of its head's output, which `logits_BV` are.
    """
    if fused:
        from lemma.engines.native.sampling_kernels import sample

        return sample(logits_BV, keys_B2, positions_B, inverse_B, noisy_B, *means, cuts)
    assert cuts is None
    z_BV = _exact(map_logits(logits_BV, *means)) * inverse_B[:, None]
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


def way_of(sequences: Rows[Sequence], kernels: Callable[[], bool], eos: int) -> Way:
    """How the next tokens of these are drawn: on the device from the whole vocabulary or a part, or with the host.
    `kernels` says whether there are kernels that cut."""
    if all(is_plain(s) for s in sequences):
        return "whole"
    return "cut" if all(_is_cut_by_kernels(s, eos) for s in sequences) and kernels() else "host"


def kernels_cut(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels that cut the support can be compiled here, and do what the reference does."""
    from lemma.engines.native.sampling_kernels import sample

    sampling = Sampling(max_tokens=1, top_k=40, top_p=0.8, min_p=0.02)
    ramp = torch.arange(200, device=device)
    logits = torch.sin(ramp * 12.9898)[None].to(dtype) * 4
    ones = torch.ones(1, device=device)
    cuts = Cuts.empty(1, device)
    cuts.top_k_B[0], cuts.top_p_B[0], cuts.min_p_B[0] = sampling.top_k, sampling.top_p, math.log(sampling.min_p)
    keys, place = torch.tensor([[7, 9]], device=device), torch.zeros(1, dtype=torch.int64, device=device)
    try:
        tokens, _, kept = sample(logits, keys, place, ones, ones, cuts=cuts)
    except Exception as error:  # noqa: BLE001 (whatever a compiler of another version says)
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        message = f"top-k, top-p and min-p are slow here: their kernel cannot be compiled ({first})"
        warnings.warn(message, LemmaWarning, stacklevel=2)
        return False
    masked, mass = cut(logits, sampling)
    wanted = (masked + gumbel(row_seeds(keys, place), logits.shape[-1])).argmax(-1)
    return bool((tokens == wanted).all() and (kept - mass).abs().max() < 1e-3)


def _is_cut_by_kernels(sequence: Sequence, eos: int) -> bool:
    sampling = sequence.request.sampling
    few = not sampling.min_tokens or len(end_ids(sampling, eos)) <= ENDS
    return sampling.repetition_penalty == 1.0 and few


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
