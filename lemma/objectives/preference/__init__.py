"""Preference losses: DPO and its variants, KTO, CPO with SimPO and AlphaPO, ORPO."""

from lemma.objectives.preference.cpo_loss import ContrastivePreference
from lemma.objectives.preference.dpo_loss import DirectPreference
from lemma.objectives.preference.kto_loss import KahnemanTversky, reference_point
from lemma.objectives.preference.orpo_loss import OddsRatio
from lemma.objectives.preference.pair_pieces import sequence_logprobs

__all__ = [
    "ContrastivePreference",
    "DirectPreference",
    "KahnemanTversky",
    "OddsRatio",
    "reference_point",
    "sequence_logprobs",
]
