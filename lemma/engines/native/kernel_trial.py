"""Whether the kernels that cut the support of a distribution work on this device: tried once, before they are used."""

from __future__ import annotations

import torch

from lemma.core.errors import warn
from lemma.engines.native.cuts import Cuts
from lemma.engines.native.noise import gumbel, row_seeds
from lemma.engines.native.sampler import PLAIN
from lemma.engines.protocol import Sampling
from lemma.engines.sampling import cut
from lemma.models.families import LogitMap
from lemma.models.logprobs import map_logits

# Settings that the kernels are tested with before they are used.
TRIALS = tuple(
    Sampling(max_tokens=1, **cuts)
    for cuts in (
        {"top_k": 40}, {"top_p": 0.8}, {"min_p": 0.3}, {"top_k": 40, "top_p": 0.8, "min_p": 0.5}, {"min_tokens": 1}
    )
)  # fmt: skip


def kernels_cut(device: torch.device, dtype: torch.dtype, logit_map: LogitMap = PLAIN) -> bool:
    """Whether the kernels that cut the support compile here and agree with the reference. If not, a warning says
    why."""
    try:
        trouble = _kernel_fault(device, dtype, logit_map)
    except Exception as error:  # noqa: BLE001 (whatever a compiler of another version says)
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        trouble = f"cannot be compiled ({first})"
    if trouble is not None:
        message = f"top-k, top-p, min-p and min_tokens are slow here: their kernel {trouble}"
        warn(message)
    return trouble is None


def _kernel_fault(device: torch.device, dtype: torch.dtype, logit_map: LogitMap) -> str | None:
    """How the kernels differ from the reference, if they do: each cut alone, all together, and a forbidden end."""
    from lemma.engines.native.sampling_kernels import sample

    rows, columns = len(TRIALS), 200
    ramp = torch.arange(rows * columns, device=device).view(rows, columns)
    logits_BV = (torch.sin(ramp * 12.9898) * 4).to(dtype)
    ends = [int(row.argmax()) if trial.min_tokens else -1 for row, trial in zip(logits_BV, TRIALS, strict=True)]
    cuts = Cuts.empty(rows, torch.device("cpu"))
    for row, trial in enumerate(TRIALS):
        cuts.limit(row, trial)
        cuts.ends_BE[row, 0], cuts.until_B[row] = ends[row], trial.min_tokens
    cuts = Cuts(*(tensor.to(device) for tensor in cuts))
    keys, ones = torch.tensor([[7, 9]] * rows, device=device), torch.ones(rows, device=device)
    places = torch.zeros(rows, dtype=torch.int64, device=device)
    tokens_B, _, kept_B = sample(logits_BV, keys, places, ones, ones, *logit_map, cuts)
    noise_BV = gumbel(row_seeds(keys, places), columns)
    for row, trial in enumerate(TRIALS):
        masked, mass = cut(map_logits(logits_BV[row], *logit_map), trial, [ends[row]] if trial.min_tokens else ())
        wanted, found = int((masked + noise_BV[row]).argmax()), int(tokens_B[row])
        off = abs(float(kept_B[row] - mass))
        if found != wanted or not off < 1e-3:
            return f"draws token {found} where {wanted} is due; the log of the mass it keeps is off by {off:.2g}"
    return None
