"""The policy-gradient loss, top to bottom: the loss of a step, the ratio, what each token gains, what is left out or
weighted because the sampler differed, and the KL to a reference.

    loss = - sum w keep m gain(r, A)  +  kl sum w KL  -  entropy (mean entropy)

- r is current / old, of a token, of a turn or of a whole sequence; A the advantage of the token.
- `gain` is a surrogate. Clip is min(r A, clip(r, low, high) A).
- w divides (`token_weights`): 1 / tokens of the step; 1 / (tokens of the sequence x sequences of the step); or
  1 / (constant x sequences of the step).
- m is the mismatch weight, and `keep` leaves tokens out; both are 1 unless they are asked for.

Known algorithms are special cases:

- REINFORCE: LogprobGain, and the advantages say which baseline;
- GRPO: Clip.around(0.2), normalised by sequence; Dr. GRPO: by a constant; PPO, DAPO, BNPO: by token;
- GSPO: Clip with tiny bounds on the ratio of a `sequence`; LUSPO: the same, normalised by the constant 1;
- RLOO, LOOP per trajectory: Clip on the ratio of a `trajectory`;
- CISPO: CappedWeight; SAPO: SoftGate; VESPO: GammaWeight on the ratio of a `trajectory`.

It reads these token fields: `advantage` and, if present, `old` (absent: the current policy sampled), `reference`
(needed for a KL) and `sampler_logprobs` (the sampler's log-probability).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch

from lemma.core.types import Output, Scope
from lemma.objectives.objective import Loss, LossInputs, Normalise, Ratio, token_weights

Level = Literal["token", "turn", "sequence", "trajectory"]
KlKind = Literal["k1", "k2", "k3", "low_var_kl", "abs", "weighted", "kl", "mse", "kl1", "kl2", "kl3"]

LARGEST_LOG_RATIO = 60.0
"""A ratio beyond exp of this has no gradient; unbounded it could be infinite, and infinity times 0 is NaN."""
LOW_VARIANCE_LIMIT = 10.0


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
    def outputs(self) -> tuple[Output, ...]:
        reads_entropy = self.watch_entropy or self.entropy != 0.0 or self.top_entropy < 1.0
        return ("logprobs", "entropy") if reads_entropy else ("logprobs",)

    def __call__(self, terms: LossInputs) -> Loss:
        logprobs_N, advantage_N = terms.logprobs_N, terms.tokens["advantage"]
        old_N = terms.tokens.get("old", logprobs_N.detach())
        ratio_N = ratios(terms, old_N, self.level)
        weight_N = token_weights(terms, self.normalise, self.constant)
        metrics: dict[str, Ratio] = {}
        gain_weight_N = weight_N
        if self.level == "trajectory":  # each trajectory is an action and counts as the whole episode
            gain_weight_N = weight_N * (terms.episode_tokens_B() / terms.lengths_B())[terms.sequence_N]

        policy_N = -self.surrogate.gain(ratio_N, logprobs_N, advantage_N)
        leaves_out = self.top_entropy < 1.0 or self.off_policy_limit is not None
        keep_N = self._kept(terms, old_N) if leaves_out else None
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
            bonus_N = terms.entropy_N if self.top_entropy == 1.0 or keep_N is None else terms.entropy_N * keep_N
            value = value - self.entropy * bonus_N.sum() / max(terms.totals.tokens, 1.0)
        measured, maxima = self._measured(terms, ratio_N.detach(), old_N)
        return Loss(value, metrics | measured, maxima)

    def _kept(self, terms: LossInputs, old_N: torch.Tensor) -> torch.Tensor | None:
        """1 where the policy term is kept; None if it is kept everywhere."""
        keep_N: torch.Tensor | None = None
        if self.top_entropy < 1.0 and len(terms.logprobs_N):
            entropy_N = terms.entropy_N.detach()
            keep_N = entropy_N >= quantile(entropy_N, 1.0 - self.top_entropy)
        if self.off_policy_limit is not None:
            fallen_N = (engine_logprobs(terms, old_N) - terms.logprobs_N).detach()
            fallen_B = terms.per_sequence(fallen_N) / terms.lengths_B()
            near_N = (terms.tokens["advantage"] >= 0) | (fallen_B <= self.off_policy_limit)[terms.sequence_N]
            keep_N = near_N if keep_N is None else keep_N & near_N
        return keep_N

    def _measured(
        self, terms: LossInputs, ratio_N: torch.Tensor, old_N: torch.Tensor
    ) -> tuple[dict[str, Ratio], dict[str, torch.Tensor]]:
        """Means, and maxima, which nothing has none of."""
        metrics: dict[str, Ratio] = {"surprisal": _mean(-terms.logprobs_N)}
        maxima: dict[str, torch.Tensor] = {}
        if "entropy" in terms.outputs:
            metrics["entropy"] = _mean(terms.entropy_N)
        if "sampler_logprobs" in terms.tokens:
            maxima["mismatch/max"] = gap_N = mismatch(terms, old_N)
            metrics["mismatch/mean"] = _mean(gap_N)
        if "old" in terms.tokens:
            maxima["ratio/max"] = ratio_N
            metrics["ratio/mean"] = _mean(ratio_N)
            metrics["kl/old"] = _mean(kl_estimate("k3", old_N, terms.logprobs_N))
            clipped = dict(self.surrogate.clipped(ratio_N, terms.tokens["advantage"]))
            if {"low", "high"} <= clipped.keys():
                clipped["region"] = clipped["low"] | clipped["high"]
            for name, clipped_N in clipped.items():
                metrics[f"clip/{name}"] = self._share(terms, clipped_N.to(ratio_N.dtype))
        if isinstance(self.surrogate, GammaWeight):
            metrics["weight/mean"] = self._share(terms, self.surrogate.weight(ratio_N, terms.tokens["advantage"]))
        return metrics, {name: values_N.max() for name, values_N in maxima.items() if len(values_N)}

    def _share(self, terms: LossInputs, values_N: torch.Tensor) -> Ratio:
        """The mean over the units that have their own ratio: tokens, turns or sequences."""
        if self.level == "token":
            return _mean(values_N)
        if self.level == "turn":
            place_N = terms.turn_N()
            return _mean(_summed(values_N, place_N) / _summed(torch.ones_like(values_N), place_N).clamp(min=1))
        return (terms.per_sequence(values_N) / terms.lengths_B()).sum(), float(terms.sequences)


def ratios(terms: LossInputs, old_N: torch.Tensor, level: Level) -> torch.Tensor:
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


class Surrogate:
    """A function of the advantage and of the ratio of the policy to the one that sampled, elementwise on tensors of any
    shape, to be maximised."""

    def gain(self, ratio: torch.Tensor, logprobs: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def clipped(self, ratio: torch.Tensor, advantage: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """What it clips, for the metrics: `low` (negative advantage, already less likely than before), `high` (positive
        advantage, already more likely) and `region` (either, or a weight that was capped whatever the advantage)."""
        return {}


@dataclass(frozen=True)
class LogprobGain(Surrogate):
    """A log p: no ratio, so correct only for tokens that the current policy sampled."""

    def gain(self, ratio: torch.Tensor, logprobs: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
        return advantage * logprobs


@dataclass(frozen=True)
class Unclipped(Surrogate):
    """r A."""

    def gain(self, ratio: torch.Tensor, logprobs: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
        return ratio * advantage


@dataclass(frozen=True)
class Clip(Surrogate):
    """min(r A, clip(r, low, high) A); with `cap`, r itself is capped (two-sided clipping, for A < 0 too)."""

    low: float
    high: float
    cap: float | None = None

    @classmethod
    def around(cls, epsilon: float, epsilon_high: float | None = None, cap: float | None = None) -> Clip:
        """[1 - epsilon, 1 + epsilon_high], as in PPO; a larger `epsilon_high` is DAPO's clip-higher."""
        return cls(1.0 - epsilon, 1.0 + (epsilon if epsilon_high is None else epsilon_high), cap)

    @classmethod
    def symmetric_in_log(cls, epsilon: float) -> Clip:
        """[1 / (1 + epsilon), 1 + epsilon], as in LOOP."""
        return cls(1.0 / (1.0 + epsilon), 1.0 + epsilon)

    def gain(self, ratio: torch.Tensor, logprobs: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
        capped = ratio if self.cap is None else ratio.clamp(max=self.cap)
        return torch.minimum(capped * advantage, ratio.clamp(self.low, self.high) * advantage)

    def clipped(self, ratio: torch.Tensor, advantage: torch.Tensor) -> Mapping[str, torch.Tensor]:
        ratio = ratio if self.cap is None else ratio.clamp(max=self.cap)
        return {"low": (ratio < self.low) & (advantage < 0), "high": (ratio > self.high) & (advantage > 0)}


@dataclass(frozen=True)
class CappedWeight(Surrogate):
    """min(r, cap) A log p, with no gradient through the weight (CISPO): no token loses its gradient entirely."""

    cap: float

    def gain(self, ratio: torch.Tensor, logprobs: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
        return ratio.detach().clamp(max=self.cap) * advantage * logprobs

    def clipped(self, ratio: torch.Tensor, advantage: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {"high": (ratio > self.cap) & (advantage > 0), "region": ratio > self.cap}


@dataclass(frozen=True)
class SoftGate(Surrogate):
    """4 / t sigmoid(t (r - 1)) A, with a temperature t for each sign of A (SAPO): a smooth version of clipping."""

    positive: float = 1.0
    negative: float = 1.05

    def gain(self, ratio: torch.Tensor, logprobs: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
        temperature = torch.where(advantage > 0, self.positive, self.negative)
        return 4.0 / temperature * torch.sigmoid(temperature * (ratio - 1.0)) * advantage


@dataclass(frozen=True)
class GammaWeight(Surrogate):
    """w^k exp(l (1 - w)) A log p, with no gradient through the weight (VESPO). w is the ratio of a whole sequence.

    The weight is 1 at w = 1 and falls on both sides; k and l depend on the sign of A.
    """

    power_positive: float = 2.0
    decay_positive: float = 3.0
    power_negative: float = 3.0
    decay_negative: float = 2.0

    def weight(self, ratio: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
        log_w = ratio.detach().log().clamp(math.log(1e-8), 20.0)
        wanted = advantage >= 0
        power = torch.where(wanted, self.power_positive, self.power_negative)
        decay = torch.where(wanted, self.decay_positive, self.decay_negative)
        return (decay + power * log_w - decay * log_w.exp()).exp()

    def gain(self, ratio: torch.Tensor, logprobs: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
        return self.weight(ratio, advantage) * advantage * logprobs


@dataclass(frozen=True)
class MismatchWeight:
    """exp(old - sampler_logprobs), of each token or of each whole sequence.

    It is clipped to [`floor`, `cap`]; with `mask`, tokens or sequences outside are left out instead.
    """

    level: Literal["token", "sequence"] = "token"
    cap: float = 2.0
    floor: float | None = None
    mask: bool = False

    def __call__(self, terms: LossInputs, old_N: torch.Tensor) -> torch.Tensor:
        """Weights (N,), without gradient."""
        log_N = (old_N - terms.tokens["sampler_logprobs"]).detach()
        if self.level == "sequence":
            log_N = terms.per_sequence(log_N)[terms.sequence_N]
        weight_N = log_N.clamp(max=LARGEST_LOG_RATIO).exp()
        floor = 0.0 if self.floor is None else self.floor
        if self.mask:
            return torch.where((weight_N > self.cap) | (weight_N < floor), 0.0, weight_N)
        return weight_N.clamp(floor, self.cap)


def engine_logprobs(terms: LossInputs, old_N: torch.Tensor) -> torch.Tensor:
    """The engine's log-probability of each token over the whole vocabulary, like the learner's: if it sampled from a
    part of it, the log of the mass it kept is added back. Without an engine, the old policy's."""
    if "sampler_logprobs" not in terms.tokens:
        return old_N
    return terms.tokens["sampler_logprobs"] + terms.tokens.get("log_kept_mass", 0.0)


def mismatch(terms: LossInputs, old_N: torch.Tensor) -> torch.Tensor:
    """Absolute difference of the engine's and the learner's log-probability of each sampled token."""
    gap_N = (old_N - engine_logprobs(terms, old_N)).detach().abs()
    return gap_N * (1.0 - terms.tokens["off"]) if "off" in terms.tokens else gap_N


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


_FORMULAS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "k1": lambda d: d,
    "k2": lambda d: 0.5 * d.square(),
    "k3": lambda d: torch.expm1(-d) + d,
    "low_var_kl": lambda d: (torch.expm1(-d) + d).clamp(-LOW_VARIANCE_LIMIT, LOW_VARIANCE_LIMIT),
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
