"""Expert iteration, or rejection-sampling fine-tuning: sample, keep what is right, imitate it (Anthony et al., 2017).

    loss = - mean over the tokens of right samples of log p

There are no weights and no ratios; a batch may be used several times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from lemma.algorithms.algorithm import Algorithm, AlgorithmState
from lemma.algorithms.parts.loss_options import Constant, Normalise, check_divisor
from lemma.core.types import Group, Trajectory

if TYPE_CHECKING:
    from lemma.objectives import NegativeLogLikelihood


class ExpertIteration(Algorithm):
    """Imitate the policy's own right samples."""

    name: Literal["expert_iteration"] = "expert_iteration"
    """Imitation of the policy's own right samples."""
    threshold: float = 1.0
    """Samples with at least this reward count as right."""
    per_problem: int | None = Field(None, ge=1)
    """Maximum number of samples to keep per problem, so that easy ones do not crowd out the others. Default: all."""
    distinct: bool = True
    """Keep identical samples of a problem only once."""
    normalise: Normalise = "token"
    constant: Constant = None

    compares: ClassVar[bool] = False

    @model_validator(mode="after")
    def _works_together(self) -> Self:
        check_divisor(self.normalise, self.constant)
        if self.per_problem is not None and self.per_problem > self.group_size:
            raise ValueError(f"per_problem {self.per_problem} is above group_size {self.group_size}; lower it")
        return self

    @property
    def needs_old(self) -> bool:
        return False

    @property
    def advice_without_signal(self) -> str:
        return (
            f"almost no completion is worth `algorithm.threshold` ({self.threshold:g}), so nothing is imitated; lower "
            "it, or raise the weights in `rewards`"
        )

    def assign(self, groups: Sequence[Group], memory: AlgorithmState) -> None:
        """Samples that are not kept are masked: they are neither computed nor counted."""
        for group in groups:
            kept = {id(trajectory) for trajectory in self.kept(group)}
            for trajectory in group.trajectories:
                trajectory.token_fields["advantage"] = np.full(len(trajectory), float(id(trajectory) in kept))
                if id(trajectory) not in kept:
                    trajectory.loss_mask_T = np.zeros_like(trajectory.loss_mask_T)

    def has_signal(self, group: Group) -> bool:
        return bool(self.kept(group))

    def kept(self, group: Group) -> list[Trajectory]:
        """The samples to imitate, in the order in which they were sampled."""
        right: dict[bytes | int, list[Trajectory]] = {}
        for number, episode in enumerate(group.episodes):
            if episode[0].rewards["total"] >= self.threshold and any(one.trained_tokens for one in episode):
                right.setdefault(b"".join(one.ids_T.tobytes() for one in episode) if self.distinct else number, episode)
        return [one for episode in list(right.values())[: self.per_problem] for one in episode]

    def objective(self, max_tokens: int, memory: AlgorithmState) -> NegativeLogLikelihood:
        from lemma.objectives import NegativeLogLikelihood

        return NegativeLogLikelihood(self.normalise, self.constant or float(max_tokens), name=self.name)
