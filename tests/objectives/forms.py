"""Every objective, in each form that changes its formula or what must stay together; the invariance tests run over
these. Variants of DPO that differ in the formula of a pair alone need no line of their own."""

from __future__ import annotations

from collections.abc import Callable

from lemma.objectives import ClippedValueLoss, MixedPolicyLoss, NegativeLogLikelihood, Objective, PolicyLoss
from lemma.objectives.policy_loss import (
    CappedWeight,
    Clip,
    GammaWeight,
    KlTerm,
    LogprobGain,
    MismatchWeight,
    SoftGate,
    Unclipped,
)
from lemma.objectives.preference import ContrastivePreference, DirectPreference, KahnemanTversky, OddsRatio

OBJECTIVES: dict[str, Callable[[], Objective]] = {
    "nll_token": lambda: NegativeLogLikelihood("token"),
    "nll_sequence": lambda: NegativeLogLikelihood("sequence"),
    "nll_constant": lambda: NegativeLogLikelihood("constant", constant=42.0),
    "dpo": lambda: DirectPreference({"sigmoid": 0.8, "ipo": 0.2}, length_alpha=0.3, weighting=True, nll=0.5),
    "dpo_aot": lambda: DirectPreference({"aot": 1.0, "aot_unpaired": 0.5}),
    "dpo_bco": lambda: DirectPreference({"bco": 1.0}, running=(3, 0.1)),
    "kto": lambda: KahnemanTversky(wanted_weight=1.3, baseline=0.2),
    "simpo": lambda: ContrastivePreference("simpo", beta=2.0, gamma=1.0, alpha=0.1, nll=0.3),
    "orpo": lambda: OddsRatio(),
    "policy_reinforce": lambda: PolicyLoss(LogprobGain(), entropy=0.01),
    "policy_unclipped": lambda: PolicyLoss(Unclipped(), normalise="constant", constant=42.0),
    "policy_clip": lambda: PolicyLoss(
        Clip.around(0.1, 0.15), kl=KlTerm(0.001), mismatch=MismatchWeight("token", cap=1.1)
    ),
    "policy_clip_sequence": lambda: PolicyLoss(
        Clip.around(0.2, cap=1.4), normalise="sequence", kl=KlTerm(0.001, by_ratio=True)
    ),
    "policy_capped": lambda: PolicyLoss(CappedWeight(1.1)),
    "policy_soft": lambda: PolicyLoss(SoftGate(), normalise="sequence"),
    "policy_gamma": lambda: PolicyLoss(GammaWeight(), level="trajectory"),
    "policy_ratio_of_sequence": lambda: PolicyLoss(
        Clip.around(0.05, 0.1), level="sequence", normalise="constant", mismatch=MismatchWeight("sequence", cap=1.1)
    ),
    "policy_ratio_of_trajectory": lambda: PolicyLoss(
        Clip.symmetric_in_log(0.3), level="trajectory", normalise="sequence", off_policy_limit=0.01
    ),
    "policy_top_entropy": lambda: PolicyLoss(Clip.around(0.2), top_entropy=0.3, entropy=0.01),
    "mixed": lambda: MixedPolicyLoss(normalise="constant", constant=42.0, entropy=0.01, off_max=0.9, skip_above=0.95),
    "mixed_sft": lambda: MixedPolicyLoss(
        Clip.around(0.2, 0.28), "sequence", sft=0.5, kl=KlTerm(0.05, "low_var_kl"), mismatch=MismatchWeight(cap=1.1)
    ),
    "mixed_batch": lambda: MixedPolicyLoss(entropy=0.01, entropy_target=2.0, ratio_kl=0.3),
    "value": ClippedValueLoss,
}
