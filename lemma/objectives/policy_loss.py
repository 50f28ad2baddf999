"""The policy-gradient loss: one formula, composed of interchangeable pieces.

    loss = - sum w keep m gain(r, A)  +  kl sum w KL  -  entropy (mean entropy)

- r is current / old, of a token, of a turn or of a whole sequence; A the advantage of the token.
- `gain` is a surrogate (policy_surrogates.py). Clip is min(r A, clip(r, low, high) A).
- w divides (normalise.py): 1 / tokens of the step; 1 / (tokens of the sequence x sequences of the step); or
  1 / (constant x sequences of the step).
- m is the mismatch weight (policy_mismatch.py), and `keep` leaves tokens out; both are 1 unless they are asked for.

Known algorithms are special cases:

- REINFORCE: Reinforce, and the advantages say which baseline;
- GRPO: Clip.around(0.2), normalised by sequence; Dr. GRPO: by a constant; PPO, DAPO, BNPO: by token;
- GSPO: Clip with tiny bounds on the ratio of a `sequence`; LUSPO: the same, normalised by the constant 1;
- RLOO, LOOP per trajectory: Clip on the ratio of a `trajectory`;
- CISPO: CappedWeight; SAPO: SoftGate; VESPO: GammaWeight on the ratio of a `trajectory`.

It reads these token fields: `advantage` and, if present, `old` (absent: the current policy sampled), `reference`
(needed for a KL) and `behaviour` (the sampler's log-probability).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from lemma.core.types import Scope
from lemma.objectives.kl import KlKind, kl_estimate
from lemma.objectives.normalise import Normalise, token_weights
from lemma.objectives.objective import Loss, Ratio, Terms
from lemma.objectives.policy_mismatch import LARGEST_LOG_RATIO, MismatchWeight, engine_logprobs, mismatch
from lemma.objectives.policy_surrogates import Clip, GammaWeight, Surrogate

Level = Literal["token", "turn", "sequence", "trajectory"]


@dataclass(frozen=True)
class KlTerm:
    """`weight` times an estimate of the KL to the reference.

    The estimate is correct for tokens of the current policy; `by_ratio` multiplies it by current / old, so that it is
    also correct for those of the old one. `limit` bounds the difference of log-probabilities.
    """

    weight: float
    estimator: KlKind = "k3"
    by_ratio: bool = False
    limit: float | None = None

    def __call__(self, logprobs_N: torch.Tensor, reference_N: torch.Tensor, ratio_N: torch.Tensor) -> torch.Tensor:
        estimate_N = kl_estimate(self.estimator, logprobs_N, reference_N, ratio=ratio_N, limit=self.limit)
        return estimate_N * ratio_N if self.by_ratio else estimate_N


@dataclass(frozen=True)
class PolicyLoss:
    """`level` is the level of the ratio: each `token`'s own; the `turn`'s, the product of its tokens' ratios; the
    `sequence`'s, their geometric mean; or the `trajectory`'s, their product.

    `top_entropy` restricts the policy term to this share of the batch's tokens, those of highest entropy.
    `off_policy_limit` leaves out sequences with negative advantage whose log-probability per token fell by more.
    `watch_entropy` asks for the entropy as a metric even if nothing else needs it.
    """

    surrogate: Surrogate = field(default_factory=lambda: Clip.around(0.2))
    level: Level = "token"
    normalise: Normalise = "token"
    constant: float = 1.0
    kl: KlTerm | None = None
    entropy: float = 0.0
    mismatch: MismatchWeight | None = None
    top_entropy: float = 1.0
    off_policy_limit: float | None = None
    watch_entropy: bool = False
    name: str = "policy"

    def __post_init__(self) -> None:
        assert self.level == "trajectory" or not isinstance(self.surrogate, GammaWeight), "its w is a sequence's ratio"

    @property
    def scope(self) -> Scope:
        if self.top_entropy < 1.0:
            return "batch"
        whole = self.level != "token" or self.normalise == "sequence" or self.off_policy_limit is not None
        return "sequence" if whole or (self.mismatch and self.mismatch.level == "sequence") else "token"

    @property
    def needs_entropy(self) -> bool:
        return self.watch_entropy or self.entropy != 0.0 or self.top_entropy < 1.0

    def __call__(self, terms: Terms) -> Loss:
        logprobs_N, advantage_N = terms.logprobs_N, terms.tokens["advantage"]
        old_N = terms.tokens.get("old", logprobs_N.detach())
        ratio_N = ratios(terms, old_N, self.level)
        weight_N = token_weights(terms, self.normalise, self.constant)
        metrics: dict[str, Ratio] = {}
        gain_weight_N = weight_N
        if self.level == "trajectory":  # each trajectory is an action and counts as the whole episode
            gain_weight_N = weight_N * (terms.said_B() / terms.lengths_B())[terms.sequence_N]

        policy_N = -self.surrogate.gain(ratio_N, logprobs_N, advantage_N)
        keep_N = self._kept(terms, old_N)
        if keep_N is not None:
            policy_N = policy_N * keep_N
        if self.mismatch is not None:
            mismatch_N = self.mismatch(terms, old_N)
            policy_N = policy_N * mismatch_N
            metrics |= {"mismatch/weight": _mean(mismatch_N), "mismatch/square": _mean(mismatch_N**2)}
        value = (gain_weight_N * policy_N).sum()
        if self.kl is not None:
            kl_N = self.kl(logprobs_N, terms.tokens["reference"], ratio_N)
            value = value + self.kl.weight * (weight_N * kl_N).sum()
            metrics["kl"] = _mean(kl_N)
        if self.entropy != 0.0:
            assert terms.entropy_N is not None
            bonus_N = terms.entropy_N if self.top_entropy == 1.0 or keep_N is None else terms.entropy_N * keep_N
            value = value - self.entropy * bonus_N.sum() / max(terms.totals.tokens, 1.0)
        return Loss(value, metrics | self._metrics(terms, ratio_N.detach(), old_N), _maxima(terms, ratio_N, old_N))

    def _kept(self, terms: Terms, old_N: torch.Tensor) -> torch.Tensor | None:
        """1 where the policy term is kept; None if it is kept everywhere."""
        keep_N: torch.Tensor | None = None
        if self.top_entropy < 1.0 and len(terms.logprobs_N):
            assert terms.entropy_N is not None
            entropy_N = terms.entropy_N.detach()
            keep_N = entropy_N >= quantile(entropy_N, 1.0 - self.top_entropy)
        if self.off_policy_limit is not None:
            fallen_N = (engine_logprobs(terms, old_N) - terms.logprobs_N).detach()
            fallen_B = terms.per_sequence(fallen_N) / terms.lengths_B()
            near_N = (terms.tokens["advantage"] >= 0) | (fallen_B <= self.off_policy_limit)[terms.sequence_N]
            keep_N = near_N if keep_N is None else keep_N & near_N
        return keep_N

    def _metrics(self, terms: Terms, ratio_N: torch.Tensor, old_N: torch.Tensor) -> dict[str, Ratio]:
        metrics: dict[str, Ratio] = {"surprisal": _mean(-terms.logprobs_N)}
        if terms.entropy_N is not None:
            metrics["entropy"] = _mean(terms.entropy_N)
        if "behaviour" in terms.tokens:
            metrics["mismatch/mean"] = _mean(mismatch(terms, old_N))
        if "old" in terms.tokens:
            metrics["ratio/mean"] = _mean(ratio_N)
            metrics["kl/old"] = _mean(kl_estimate("k3", old_N, terms.logprobs_N))
            clipped = dict(self.surrogate.clipped(ratio_N, terms.tokens["advantage"]))
            if {"low", "high"} <= clipped.keys():
                clipped["region"] = clipped["low"] | clipped["high"]
            for name, clipped_N in clipped.items():
                metrics[f"clip/{name}"] = self._share(terms, clipped_N.to(ratio_N.dtype))
        if isinstance(self.surrogate, GammaWeight):
            metrics["weight/mean"] = self._share(terms, self.surrogate.weight(ratio_N, terms.tokens["advantage"]))
        return metrics

    def _share(self, terms: Terms, values_N: torch.Tensor) -> Ratio:
        """The mean over the units that have their own ratio: tokens, turns or sequences."""
        if self.level == "token":
            return _mean(values_N)
        if self.level == "turn":
            place_N = terms.turn_N()
            return _mean(_summed(values_N, place_N) / _summed(torch.ones_like(values_N), place_N).clamp(min=1))
        return (terms.per_sequence(values_N) / terms.lengths_B()).sum(), float(terms.sequences)


def ratios(terms: Terms, old_N: torch.Tensor, level: Level) -> torch.Tensor:
    """current / old for each token (N,), differentiable; at the other levels, that of the token's turn or sequence."""
    log_N = terms.logprobs_N - old_N
    if level == "turn":
        place_N = terms.turn_N()
        log_N = _summed(log_N, place_N)[place_N]
    elif level != "token":
        log_B = terms.per_sequence(log_N)
        log_N = (log_B / terms.lengths_B() if level == "sequence" else log_B)[terms.sequence_N]
    return log_N.clamp(max=LARGEST_LOG_RATIO).exp()


def quantile(values_N: torch.Tensor, share: float) -> torch.Tensor:
    """Like `torch.quantile`, which refuses more than 2^24 numbers; bit-identical up to that size."""
    exact = values_N.dtype if len(values_N) <= 2**24 else torch.float64
    place = torch.tensor(share, dtype=exact) * (len(values_N) - 1)
    below, above = (values_N.kthvalue(int(x) + 1).values for x in (place.floor(), place.ceil()))
    return below.lerp(above, float(place - place.floor()))


def _summed(values_N: torch.Tensor, place_N: torch.Tensor) -> torch.Tensor:
    """Sums over the tokens of each index."""
    places = int(place_N.max()) + 1 if len(place_N) else 0
    return torch.zeros(places, dtype=values_N.dtype, device=values_N.device).index_add(0, place_N, values_N)


def _mean(values_N: torch.Tensor) -> Ratio:
    return values_N.detach().sum(), float(len(values_N))


def _maxima(terms: Terms, ratio_N: torch.Tensor, old_N: torch.Tensor) -> dict[str, torch.Tensor]:
    maxima: dict[str, torch.Tensor] = {}
    if len(ratio_N) and "old" in terms.tokens:
        maxima["ratio/max"] = ratio_N.detach().max()
    if len(ratio_N) and "behaviour" in terms.tokens:
        maxima["mismatch/max"] = mismatch(terms, old_N).max()
    return maxima
