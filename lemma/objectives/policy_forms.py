"""The policy loss in each form that changes its formula or what must stay together."""

from __future__ import annotations

from collections.abc import Callable

from lemma.objectives.policy_loss import KlTerm, PolicyLoss
from lemma.objectives.policy_mismatch import MismatchWeight
from lemma.objectives.policy_surrogates import CappedWeight, Clip, GammaWeight, Reinforce, SoftGate, Unclipped

POLICY_FORMS: dict[str, Callable[[], PolicyLoss]] = {
    "policy_reinforce": lambda: PolicyLoss(Reinforce(), entropy=0.01),
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
}
