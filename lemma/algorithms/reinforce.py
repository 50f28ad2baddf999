"""REINFORCE (Williams, 1992): log-probabilities weighted by rewards, without a baseline or with the group's mean.

Nothing corrects for older samples, so each batch is used for one update.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from lemma.algorithms.policy_gradient import Baseline, PolicyGradient

if TYPE_CHECKING:
    from lemma.objectives.policy_surrogates import Surrogate


class Reinforce(PolicyGradient):
    """-R log p: every sample counts by its reward alone. High variance; here to compare with."""

    name: Literal["reinforce"] = "reinforce"
    """REINFORCE without a baseline."""

    has_ratio: ClassVar[bool] = False

    def compared_with(self) -> Baseline:
        return "none"

    def surrogate(self) -> Surrogate:
        from lemma.objectives.policy_surrogates import Reinforce as LogProbability

        return LogProbability()


class ReinforceBaseline(Reinforce):
    """-A log p: the baseline is the mean reward of the group."""

    name: Literal["reinforce_baseline"] = "reinforce_baseline"  # type: ignore[assignment]
    """REINFORCE with the mean of the group as its baseline."""
    scale: Literal["none", "group", "batch"] = "group"
    """Divide advantages by the standard deviation of the rewards: not at all, of the group, or of the whole batch."""

    def compared_with(self) -> Baseline:
        return "mean"
