"""Preference losses: DPO and its variants, KTO, CPO with SimPO and AlphaPO, ORPO."""

from collections.abc import Callable

from lemma.objectives.objective import Objective
from lemma.objectives.preference.cpo_loss import ContrastivePreference
from lemma.objectives.preference.dpo_loss import DirectPreference
from lemma.objectives.preference.kto_loss import KahnemanTversky, reference_point
from lemma.objectives.preference.orpo_loss import OddsRatio
from lemma.objectives.preference.pieces import sequence_logprobs

# One of each scope and formula; variants of DPO that differ in the formula of a pair alone need no line of their own.
PREFERENCE_OBJECTIVES: dict[str, Callable[[], Objective]] = {
    "dpo": lambda: DirectPreference({"sigmoid": 0.8, "ipo": 0.2}, length_alpha=0.3, weighting=True, nll=0.5),
    "dpo_aot": lambda: DirectPreference({"aot": 1.0, "aot_unpaired": 0.5}),
    "dpo_bco": lambda: DirectPreference({"bco": 1.0}, running=(3, 0.1)),
    "kto": lambda: KahnemanTversky(wanted_weight=1.3, baseline=0.2),
    "simpo": lambda: ContrastivePreference("simpo", beta=2.0, gamma=1.0, alpha=0.1, nll=0.3),
    "orpo": lambda: OddsRatio(),
}

__all__ = [
    "PREFERENCE_OBJECTIVES",
    "ContrastivePreference",
    "DirectPreference",
    "KahnemanTversky",
    "OddsRatio",
    "reference_point",
    "sequence_logprobs",
]
