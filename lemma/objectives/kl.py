"""Estimates of KL(policy, reference) from the log-probabilities of sampled tokens, and the controller of its weight.

With d = log policy - log reference of a token that the policy sampled, the mean over samples of
`k1` = d, `k3` = exp(-d) - 1 + d is the KL; `k2` = d^2 / 2 has its gradient (Schulman, "Approximating KL divergence").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch

KlKind = Literal["k1", "k2", "k3", "low_var_kl", "abs", "weighted", "kl", "mse", "kl1", "kl2", "kl3"]

LOW_VARIANCE_LIMIT = 10.0


def _k3(d: torch.Tensor) -> torch.Tensor:
    return torch.expm1(-d) + d


_FORMULAS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "k1": lambda d: d,
    "k2": lambda d: 0.5 * d.square(),
    "k3": _k3,
    "low_var_kl": lambda d: _k3(d).clamp(-LOW_VARIANCE_LIMIT, LOW_VARIANCE_LIMIT),
    "abs": lambda d: d.abs(),
}
_OTHER_NAMES = {"kl": "k1", "kl1": "k1", "mse": "k2", "kl2": "k2", "kl3": "k3"}

assert set(get_args(KlKind)) == {*_FORMULAS, *_OTHER_NAMES, "weighted"}


def kl_estimate(
    kind: KlKind,
    logprobs: torch.Tensor,
    reference: torch.Tensor,
    *,
    ratio: torch.Tensor | None = None,
    limit: float | None = None,
) -> torch.Tensor:
    """One estimate per token, differentiable in `logprobs`.

    `low_var_kl` is `k3` kept within [-10, 10], where its gradient ends; `weighted` is d times `ratio`, the ratio of
    the current to the sampling policy. `limit` keeps d itself within [-limit, limit].
    """
    d = logprobs - reference
    if limit is not None:
        d = d.clamp(-limit, limit)
    if kind == "weighted":
        assert ratio is not None, "a weighted estimate needs the ratio"
        return ratio * d
    return _FORMULAS[_OTHER_NAMES.get(kind, kind)](d)


def adapted_coefficient(
    coefficient: float, observed: float, *, target: float, horizon: float, samples: int, largest: float = 0.2
) -> float:
    """The next weight of a KL penalty after a KL of `observed` was measured over `samples` samples (Ziegler et al.,
    2019).

    The weight grows if the KL is above its target and shrinks if it is below, by at most `largest` (relative) per
    `horizon` samples.
    """
    error = min(max(observed / target - 1.0, -largest), largest)
    return coefficient * (1.0 + error * samples / horizon)
