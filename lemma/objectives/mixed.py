"""LUFFY's loss: tokens that the policy chose and tokens of a teacher, in one sum.

Shapes: N trained tokens of a pack, B sequences in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from lemma.core.types import Output, Scope
from lemma.objectives.objective import Loss, LossInputs, Normalise, Ratio, token_weights
from lemma.objectives.policy_loss import LARGEST_LOG_RATIO, KlTerm, MismatchWeight, Surrogate, Unclipped, mismatch
from lemma.objectives.shaping import Shaping

TARGET_EPSILON = 1e-6


@dataclass(frozen=True)
class Compat:
    """The original's own normalisation, in which a pack is a micro-batch: the policy term is a sum over `constant`, or
    a mean over the tokens of the pack; every other term is a mean over the pack; all are divided by `accumulation`. The
    loss then depends on the packing."""

    accumulation: int = 1


@dataclass(frozen=True)
class MixedPolicyLoss:
    """Policy gradient with a teacher's tokens. Reads the token fields `advantage` and, if present, `off` (1 for a
    teacher's token), `old`, `reference`, `sampler_logprobs` and `target_prob`.

    A token of the policy has the loss -gain(r, A), with r its ratio reshaped by `on_shape`; a token of the teacher has
    -A f(p), never clipped, with f the `off_shape`, or p / target_prob if that is given, clamped to [off_min, off_max].
    Tokens more likely than `skip_above` are left out.

    With `sft` set, sequences with any token of a teacher have the loss -sft log p instead.

    The policy term and the `sft` term are divided as `normalise` says (normalise.py); entropy and KL are means over all
    trained tokens of the step. `ratio_kl` weights |mean of log old / current|, and `entropy_target` scales the
    entropy's weight by target / mean entropy: both look at the whole batch.
    """

    surrogate: Surrogate = field(default_factory=Unclipped)
    normalise: Normalise = "token"
    constant: float = 1.0
    on_shape: Shaping = field(default_factory=Shaping)
    off_shape: Shaping = field(default_factory=lambda: Shaping("p_div_p"))
    off_max: float | None = None
    off_min: float | None = None
    skip_above: float | None = None
    sft: float | None = None
    entropy: float = 0.0
    entropy_target: float | None = None
    kl: KlTerm | None = None
    ratio_kl: float = 0.0
    mismatch: MismatchWeight | None = None
    compat: Compat | None = None
    name: str = "mixed"

    @property
    def scope(self) -> Scope:
        if self.compat is None and (self.ratio_kl or self.entropy_target is not None):
            return "batch"
        return "sequence" if self.sft is not None or self.normalise == "sequence" else "token"

    @property
    def outputs(self) -> tuple[Output, ...]:
        return ("logprobs", "entropy") if self.entropy else ("logprobs",)

    def __call__(self, terms: LossInputs) -> Loss:
        tokens = _Tokens.of(terms, teaches_sft=self.sft is not None)
        losses = self._token_losses(terms, tokens)
        kept_N = 1 - tokens.sft_N
        if self.skip_above is not None:
            kept_N = kept_N * (tokens.logprobs_N.detach().exp() <= self.skip_above)
        value = self._reduce(terms, losses.loss_N * kept_N, kept_N)
        metrics = self._metrics(terms, tokens, losses)
        if self.sft is not None:
            value = value + self.sft * self._supervised(terms, tokens.sft_N)
        value = value + self._penalties(terms, tokens, metrics)
        if self.compat is not None:
            value = value / self.compat.accumulation
        return Loss(value, metrics, _maxima(terms, tokens))

    # --- tokens ------------------------------------------------------------------------------------------------

    def _token_losses(self, terms: LossInputs, tokens: _Tokens) -> _TokenLosses:
        on_N, clipped_N = self._on_policy(terms, tokens)
        ratio_N, raw_N = self._off_policy(tokens)
        loss_N = tokens.off_N * (-tokens.advantage_N * ratio_N) + (1 - tokens.off_N) * on_N
        return _TokenLosses(loss_N, clipped_N, ratio_N.detach(), raw_N.detach())

    def _on_policy(self, terms: LossInputs, tokens: _Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of each token as if the policy had sampled it, and 1 where it is clipped."""
        old_N = tokens.old_N
        if self.compat is None:  # must not overflow even where the result is not used
            old_N = torch.where(tokens.off_N > 0, tokens.logprobs_N.detach(), old_N)
        ratio_N = self.on_shape.of_ratio(tokens.logprobs_N, old_N)
        loss_N = -self.surrogate.gain(ratio_N, tokens.logprobs_N, tokens.advantage_N)
        if self.mismatch is not None:
            loss_N = loss_N * torch.where(tokens.off_N > 0, 1.0, self.mismatch(terms, tokens.old_N))
        clipped_N = torch.zeros_like(loss_N)
        for held_N in self.surrogate.clipped(ratio_N.detach(), tokens.advantage_N).values():
            clipped_N = torch.maximum(clipped_N, held_N.to(loss_N.dtype))
        return loss_N, clipped_N

    def _off_policy(self, tokens: _Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        """The weight of each token as if a teacher had sampled it, after and before clamping."""
        if tokens.target_prob_N is None:
            ratio_N = self.off_shape.of_probability(tokens.logprobs_N)
        else:
            ratio_N = tokens.logprobs_N.exp() / (tokens.target_prob_N + TARGET_EPSILON)
        if self.off_max is None and self.off_min is None:
            return ratio_N, ratio_N
        return ratio_N.clamp(self.off_min, self.off_max), ratio_N

    # --- sums --------------------------------------------------------------------------------------------------

    def _reduce(self, terms: LossInputs, losses_N: torch.Tensor, counted_N: torch.Tensor) -> torch.Tensor:
        if self.compat is None:
            return (losses_N * token_weights(terms, self.normalise, self.constant)).sum()
        if self.normalise == "constant":
            return losses_N.sum() / self.constant
        # A pack in which no token counts has loss 0; without any token, which never happens, the original gives NaN.
        return losses_N.sum() / (counted_N.sum().clamp(min=1) if len(losses_N) else counted_N.sum())

    def _supervised(self, terms: LossInputs, sft_N: torch.Tensor) -> torch.Tensor:
        losses_N = -terms.logprobs_N * sft_N
        if self.compat is None:
            return self._reduce(terms, losses_N, sft_N)
        return losses_N.sum() / sft_N.sum().clamp(min=1)

    def _mean(self, terms: LossInputs, values_N: torch.Tensor) -> torch.Tensor:
        """Over all trained tokens of the step; in compat mode over those of the pack."""
        if self.compat is not None:
            return values_N.mean()
        return values_N.sum() / max(terms.totals.tokens, 1.0)

    def _penalties(self, terms: LossInputs, tokens: _Tokens, metrics: dict[str, Ratio]) -> torch.Tensor:
        """Entropy bonus, KL to the reference, and the distance from the old policy."""
        penalty = tokens.logprobs_N.new_zeros(())
        if self.entropy:
            weight: torch.Tensor | float = self.entropy
            if self.entropy_target is not None and len(terms.entropy_N):
                weight = self.entropy * self.entropy_target / terms.entropy_N.detach().mean()
            penalty = penalty - weight * self._mean(terms, terms.entropy_N)
        if self.kl is not None:
            ratio_N = (tokens.logprobs_N - tokens.old_N).exp()
            kl_N = self.kl(tokens.logprobs_N, terms.tokens["reference"], ratio_N)
            penalty = penalty + self.kl.weight * self._mean(terms, kl_N)
            metrics["kl"] = (kl_N.detach().sum(), float(len(kl_N)))
        if self.ratio_kl:
            share_N = (1 - tokens.sft_N) / (1 - tokens.sft_N).sum().clamp(min=1)
            penalty = penalty + self.ratio_kl * ((tokens.old_N - tokens.logprobs_N) * share_N).sum().abs()
        return penalty

    def _metrics(self, terms: LossInputs, tokens: _Tokens, losses: _TokenLosses) -> dict[str, Ratio]:
        off_N, current_N = tokens.off_N, tokens.logprobs_N.detach()
        mine_N = 1 - tokens.sft_N
        on_N = (1 - off_N) * mine_N
        # The original counts clips on a teacher's tokens as well, and over all tokens.
        clip_of_N = on_N if self.compat is None else mine_N

        def mean(values_N: torch.Tensor, over_N: torch.Tensor) -> Ratio:
            return torch.where(over_N > 0, values_N, 0.0).sum(), over_N.sum()

        metrics: dict[str, Ratio] = {
            "surprisal": (-current_N.sum(), float(len(current_N))),
            "on/loss": mean(losses.loss_N.detach(), on_N),
            "on/prob": mean(tokens.old_N.exp(), on_N),
            "clip/region": mean(losses.clipped_N, clip_of_N),
            "off/loss": mean(losses.loss_N.detach(), off_N),
            "off/prob": mean(current_N.exp(), off_N),
            "off/ratio": mean(losses.ratio_N, off_N),
            "off/share": (off_N.sum(), float(len(off_N))),
            "ratio/kl": mean(tokens.old_N - current_N, mine_N),
        }
        if "entropy" in terms.outputs:
            metrics["entropy"] = (terms.entropy_N.detach().sum(), float(len(current_N)))
        if "old" in terms.tokens:
            metrics["ratio/mean"] = mean((current_N - tokens.old_N).clamp(max=LARGEST_LOG_RATIO).exp(), on_N)
        if "sampler_logprobs" in terms.tokens:
            metrics["mismatch/mean"] = mean(mismatch(terms, tokens.old_N), on_N)
        if self.mismatch is not None:
            mismatch_N = self.mismatch(terms, tokens.old_N)
            metrics |= {"mismatch/weight": mean(mismatch_N, on_N), "mismatch/square": mean(mismatch_N**2, on_N)}
        if self.off_max is not None:
            metrics["off/max_clipped"] = mean((losses.raw_N > self.off_max).to(off_N.dtype), off_N)
        if self.off_min is not None:
            metrics["off/min_clipped"] = mean((losses.raw_N < self.off_min).to(off_N.dtype), off_N)
        if self.sft is not None:
            metrics["sft/loss"] = mean(-current_N, tokens.sft_N)
        return metrics


@dataclass(frozen=True)
class _TokenLosses:
    """Per token: its loss, whether it was clipped, and its off-policy weight after and before clamping."""

    loss_N: torch.Tensor
    clipped_N: torch.Tensor
    ratio_N: torch.Tensor
    raw_N: torch.Tensor


@dataclass(frozen=True)
class _Tokens:
    """The per-token inputs of the loss, with defaults for absent ones."""

    logprobs_N: torch.Tensor
    old_N: torch.Tensor
    advantage_N: torch.Tensor
    off_N: torch.Tensor
    sft_N: torch.Tensor
    target_prob_N: torch.Tensor | None

    @classmethod
    def of(cls, terms: LossInputs, *, teaches_sft: bool) -> _Tokens:
        logprobs_N = terms.logprobs_N
        off_N = terms.tokens.get("off", torch.zeros_like(logprobs_N))
        sft_N = torch.zeros_like(off_N)
        if teaches_sft:
            sft_N = (terms.per_sequence(off_N) > 0).to(off_N.dtype)[terms.sequence_N]
        return cls(
            logprobs_N=logprobs_N,
            old_N=terms.tokens.get("old", logprobs_N.detach()),
            advantage_N=terms.tokens["advantage"],
            off_N=torch.zeros_like(off_N) if teaches_sft else off_N,
            sft_N=sft_N,
            target_prob_N=terms.tokens.get("target_prob"),
        )


def _maxima(terms: LossInputs, tokens: _Tokens) -> dict[str, torch.Tensor]:
    """The largest ratio and mismatch of the policy's own tokens."""
    other_N = (1 - tokens.off_N) * (1 - tokens.sft_N) == 0
    maxima: dict[str, torch.Tensor] = {}
    if not len(other_N):
        return maxima
    if "old" in terms.tokens:
        log_N = (tokens.logprobs_N.detach() - tokens.old_N).masked_fill(other_N, -LARGEST_LOG_RATIO)
        maxima["ratio/max"] = log_N.max().clamp(max=LARGEST_LOG_RATIO).exp()
    if "sampler_logprobs" in terms.tokens:
        maxima["mismatch/max"] = mismatch(terms, tokens.old_N).masked_fill(other_N, 0.0).max()
    return maxima
