"""Algorithms of preference optimisation: one small file each, and the one registry of them."""

from lemma.algorithms.preference.cpo import Cpo
from lemma.algorithms.preference.dpo import Dpo
from lemma.algorithms.preference.kto import Kto
from lemma.algorithms.preference.orpo import Orpo
from lemma.algorithms.preference.preference_algorithm import PreferenceAlgorithm
from lemma.algorithms.preference.simpo import Simpo
from lemma.config.registry import Registry

PREFERENCE_ALGORITHMS: Registry[type[PreferenceAlgorithm]] = Registry(
    "preference_algorithms",
    PreferenceAlgorithm,
    {
        "dpo": Dpo,
        "kto": Kto,
        "cpo": Cpo,
        "simpo": Simpo,
        "orpo": Orpo,
    },
)

__all__ = ["PREFERENCE_ALGORITHMS", "Cpo", "Dpo", "Kto", "Orpo", "PreferenceAlgorithm", "Simpo"]
