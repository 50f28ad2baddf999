"""The reference that scores tokens when they are needed: the policy without its adapters, or a second, frozen model,
which may follow the policy (TR-DPO, Gorbatovski et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from lemma.core.errors import UserError
from lemma.core.types import Trajectory
from lemma.learning.learner import Learner
from lemma.models.policy import Policy
from lemma.runs.stage import Stage
from lemma.stages.building import check_tokens, stage_policy
from lemma.stages.reference_options import ReferenceModelOptions


class SecondModel:
    """The reference as a model beside the policy. Of one that follows, a checkpoint holds the weights."""

    def __init__(self, stage: Stage, policy: Policy, options: ReferenceModelOptions | None):
        self.options = options or ReferenceModelOptions.model_construct()
        self.policy = policy
        if self.options.path is not None:
            check_tokens(stage, self.options.path, policy.tokenizer, "reference_model.path")
        self.model = stage_policy(stage, is_frozen=True, path=self.options.path)
        if self.options.follows:
            self._check_alike(stage)
            stage.keep("reference", self)

    def _check_alike(self, stage: Stage) -> None:
        shapes = [{name: p.shape for name, p in one.causal.named_parameters()} for one in (self.model, self.policy)]
        if shapes[0] != shapes[1]:
            raise UserError(
                f"stage {stage.name}: the reference {self.options.path} cannot follow a policy whose weights have "
                "other names or shapes",
                fix="remove `every` from reference_model, or name a model of the same shape",
            )

    @torch.no_grad()
    def after(self, step: int) -> None:
        """Take over a share of the policy where that is due: computed in float32, rounded once."""
        if self.options.every is None or step % self.options.every:
            return
        mix, learnt = self.options.mix, dict(self.policy.causal.named_parameters())
        for name, kept in self.model.causal.named_parameters():
            wide = torch.promote_types(kept.dtype, torch.float32)
            kept.copy_(kept.to(wide).mul(1.0 - mix).add_(learnt[name].to(wide), alpha=mix))

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        return {name: parameter.detach() for name, parameter in self.model.causal.named_parameters()}, {}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, torch.Tensor], extra: Mapping[str, Any]) -> None:
        for name, parameter in self.model.causal.named_parameters():
            parameter.copy_(tensors[name])


class ReferenceModel(Protocol):
    def scores(self, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
        """Log-probabilities of the trained tokens of each trajectory under the reference."""
        ...


class AdaptersOff:
    """The policy without its adapters, evaluated when needed."""

    def __init__(self, policy: Policy, learner: Learner):
        self._policy, self._learner = policy, learner

    def scores(self, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
        with self._policy.peft.disable_adapter():
            return self._learner.score(trajectories)


class ModelReference:
    """A second model, evaluated when needed."""

    def __init__(self, second: SecondModel, learner: Learner):
        self._second, self._learner = second, learner

    def scores(self, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
        return self._learner.score(trajectories, self._second.model)

    def after(self, step: int) -> None:
        self._second.after(step)


def live_reference(
    stage: Stage, policy: Policy, learner: Learner, options: ReferenceModelOptions | None
) -> AdaptersOff | ModelReference:
    """The reference as it is asked at every step: the policy without its adapters, or a second model."""
    if options is None and policy.is_adapter:
        return AdaptersOff(policy, learner)
    return ModelReference(SecondModel(stage, policy, options), learner)
