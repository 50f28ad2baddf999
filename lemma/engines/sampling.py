"""What the settings of a request mean: which are refused, and how they make a sampling distribution of logits. The
reference for every engine, in plain torch.

The order is that of transformers: repetition penalty, temperature, then forbidden tokens, top-k, top-p (renormalised
after top-k) and min-p (relative to the most likely token). Each cut keeps at least one token; tokens as likely as the
last one that top-k or top-p keeps are kept too, whatever their ids.

Temperature 0 takes the most likely token and cuts nothing; its log-probability is the one at temperature 1.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lemma.engines.protocol import EngineError, Request, Sampling

NEVER = float("-inf")


def check_request(request: Request, context: int) -> None:
    """Raise EngineError for a request that cannot be generated."""
    length, sampling = len(request.prompt), request.sampling
    problems: Sequence[tuple[bool, str]] = (
        (length == 0, "its prompt is empty"),
        (length >= context, f"its prompt of {length} tokens fills the context of {context}"),
        (request.n < 1, "n is below 1"),
        (sampling.max_tokens < 1, "max_tokens is below 1"),
        (sampling.temperature < 0, "temperature is below 0"),
        (not 0 < sampling.top_p <= 1, "top_p is not within 0 and 1"),
        (sampling.top_k < 0, "top_k is below 0"),
        (not 0 <= sampling.min_p <= 1, "min_p is not within 0 and 1"),
        (sampling.min_tokens > sampling.max_tokens, "min_tokens is above max_tokens"),
        (sampling.repetition_penalty <= 0, "repetition_penalty is not above 0"),
    )
    wrong = next((text for is_wrong, text in problems if is_wrong), None)
    if wrong:
        raise EngineError(f"request {request.name} cannot be generated: {wrong}")


def scale(temperature: float) -> float:
    """The divisor of the logits."""
    return temperature if temperature > 0 else 1.0


def cuts_support(sampling: Sampling) -> bool:
    """Whether some tokens are never drawn because others are likelier."""
    return sampling.top_p < 1.0 or sampling.top_k > 0 or sampling.min_p > 0.0


def end_ids(sampling: Sampling, eos: int) -> tuple[int, ...]:
    """The tokens that end a completion, once it is longer than `min_tokens`."""
    return tuple(sorted({*sampling.stop_ids, *(() if sampling.ignore_eos else (eos,))}))


def cut(
    logits_BV: torch.Tensor, sampling: Sampling, forbidden: Sequence[int] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits over temperature with -inf for every token that cannot be drawn, and the log of the kept mass (B,).

    `forbidden` are ids that must not be sampled now, such as end ids before `min_tokens`. Any number of leading
    dimensions works. float64 stays float64, everything else becomes float32.
    """
    z_BV = exact(logits_BV) / scale(sampling.temperature)
    masked_BV = z_BV.clone()
    if forbidden:
        masked_BV[..., list(forbidden)] = NEVER
    if sampling.temperature > 0 and cuts_support(sampling):
        masked_BV = _min_p(_top_p(_top_k(masked_BV, sampling.top_k), sampling.top_p), sampling.min_p)
    if not forbidden and (sampling.temperature == 0 or not cuts_support(sampling)):
        return masked_BV, torch.zeros_like(z_BV[..., 0])
    kept_B = masked_BV.logsumexp(-1) - z_BV.logsumexp(-1)
    return masked_BV, kept_B.clamp(max=0.0)


def logprobs(logits_BV: torch.Tensor, ids_B: torch.Tensor, temperature: float) -> torch.Tensor:
    """Log-probability (B,) of each id under the full softmax at the sampling temperature."""
    z_BV = exact(logits_BV) / scale(temperature)
    return z_BV.gather(-1, ids_B[..., None])[..., 0] - z_BV.logsumexp(-1)


def penalise(logits_V: torch.Tensor, seen: torch.Tensor, penalty: float) -> torch.Tensor:
    """Logits of one row with a repetition penalty on the `seen` ids of prompt and completion (CTRL, section 4.1)."""
    if penalty == 1.0:
        return logits_V
    logits_V = logits_V.clone()
    values = logits_V[seen]
    logits_V[seen] = torch.where(values > 0, values / penalty, values * penalty)
    return logits_V


def exact(logits: torch.Tensor) -> torch.Tensor:
    """In at least float32."""
    return logits if logits.dtype == torch.float64 else logits.float()


def _top_k(z_BV: torch.Tensor, top_k: int) -> torch.Tensor:
    if not 0 < top_k < z_BV.shape[-1]:
        return z_BV
    least = z_BV.topk(top_k, dim=-1).values[..., -1:]
    return z_BV.masked_fill(z_BV < least, NEVER)


def _top_p(z_BV: torch.Tensor, top_p: float) -> torch.Tensor:
    """The smallest set of the most likely tokens whose mass reaches `top_p`."""
    if top_p >= 1.0:
        return z_BV
    ordered = z_BV.sort(dim=-1, descending=True).values
    p = ordered.softmax(-1)
    stays = p.cumsum(-1) - p < top_p
    stays[..., 0] = True
    least = ordered.masked_fill(~stays, float("inf")).amin(-1, keepdim=True)
    return z_BV.masked_fill(z_BV < least, NEVER)


def _min_p(z_BV: torch.Tensor, min_p: float) -> torch.Tensor:
    if min_p <= 0.0:
        return z_BV
    gap = z_BV - z_BV.amax(-1, keepdim=True)
    return z_BV.masked_fill(gap < torch.log(torch.tensor(min_p, dtype=z_BV.dtype)).item(), NEVER)
