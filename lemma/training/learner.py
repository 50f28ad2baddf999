"""The learner: log-probabilities and optimisation steps for any objective. It does not know which algorithm it serves.

A step is: plan packs under the token budget; for each pack, forward, objective, backward; then one update. The loss is
a sum over packs divided by counts over the whole step, so the gradient does not depend on the plan. Running out of
memory halves the budget and repeats the step with the same loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from lemma.core.errors import UserError
from lemma.core.random import key
from lemma.core.ranks import sum_over_ranks
from lemma.core.types import Scope, Trajectory
from lemma.models.compiled import CompiledBlocks
from lemma.models.packing import TokenBatch, plan_packs
from lemma.models.policy import Policy
from lemma.objectives.base import Loss, Objective, Terms, Totals
from lemma.training.optimiser import Optimiser, learning_rate
from lemma.training.options import OptimOptions


@dataclass(frozen=True)
class StepReport:
    """What one optimisation step did. `metrics` are the objective's, each a sum over its count."""

    loss: float
    grad_norm: float
    lr: float
    tokens: int
    trained_tokens: int
    packs: int
    updated: bool
    metrics: dict[str, float] = field(default_factory=dict)


class Learner:
    """Owns the weights, the optimiser and the token budget. `step_count` counts optimisation steps taken."""

    def __init__(
        self,
        policy: Policy,
        optim: OptimOptions,
        *,
        token_budget: int,
        total_steps: int,
        seed: int = 0,
        temperature: float = 1.0,
        compile_blocks: bool = False,
        say: Callable[[str], None] = lambda text: None,
    ):
        self.policy = policy
        self.optim = optim
        self.token_budget = token_budget
        self.total_steps = total_steps
        self.temperature = temperature
        self.step_count = 0
        self.optimiser = Optimiser(policy.parameters(), optim)
        self._seed = seed
        self._say = say
        self._has_dropout = any(isinstance(m, torch.nn.Dropout) and m.p > 0 for m in policy.module.modules())
        self._blocks: AbstractContextManager[Any] = CompiledBlocks(policy.backbone) if compile_blocks else nullcontext()

    # --- scoring -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def score(self, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
        """Log-probability of each trained token of each trajectory, without gradient and without dropout."""
        scores: list[np.ndarray] = [np.empty(0, dtype=np.float32)] * len(trajectories)

        def work(batch: TokenBatch) -> None:
            logprobs, _ = self.policy.logprobs(batch, temperature=self.temperature)
            sizes = torch.bincount(batch.sequence_N, minlength=len(batch.index_B)).tolist()
            for index, part in zip(batch.index_B, logprobs.cpu().split(sizes), strict=True):
                scores[index] = part.numpy()

        self._without_gradient(trajectories, "token", work)
        return scores

    @torch.no_grad()
    def evaluate(self, trajectories: Sequence[Trajectory], objective: Objective) -> dict[str, float]:
        """The objective's loss and metrics on held-out trajectories, without gradient and without dropout."""
        totals = _global_totals(trajectories, self.policy.device)
        terms: list[Terms] = []
        self._without_gradient(
            trajectories, objective.scope, lambda batch: terms.append(self._terms(batch, objective, totals))
        )
        summed = _Sums(self.policy.device)
        for part in [_join(terms)] if objective.scope == "batch" else terms:
            summed.add(objective(part))
        return summed.result()

    def _without_gradient(
        self, trajectories: Sequence[Trajectory], scope: Scope, work: Callable[[TokenBatch], None]
    ) -> None:
        """Do `work` on packs that hold every trajectory once; out of memory goes on with smaller ones."""
        self.policy.module.eval()
        todo = list(range(len(trajectories)))
        while todo:
            left = [trajectories[i] for i in todo]
            done: set[int] = set()
            try:
                for pack in plan_packs(left, self.token_budget, scope):
                    indices = [todo[i] for i in pack]
                    work(TokenBatch.build(trajectories, indices, self.policy.device, self._exact))
                    done.update(indices)
            except torch.OutOfMemoryError:
                self._shrink(left, scope)
            todo = [i for i in todo if i not in done]

    # --- learning ----------------------------------------------------------------------------------------------

    def step(self, trajectories: Sequence[Trajectory], objective: Objective) -> StepReport:
        """One optimisation step on all of these trajectories (of this rank; counts are summed over ranks)."""
        self.policy.module.train()
        totals = _global_totals(trajectories, self.policy.device)
        while True:
            self.optimiser.zero()
            packs = plan_packs(trajectories, self.token_budget, objective.scope)
            try:
                summed = self._accumulate(trajectories, packs, objective, totals)
                break
            except torch.OutOfMemoryError:
                self._shrink(trajectories, objective.scope)
        rate = learning_rate(self.optim, self.step_count, self.total_steps)
        norm, updated = self.optimiser.step(rate)
        self.step_count += 1
        results = summed.result()
        return StepReport(
            loss=results.pop("loss"),
            grad_norm=norm,
            lr=rate,
            tokens=sum(len(t) for t in trajectories),
            trained_tokens=sum(t.trained_tokens for t in trajectories),
            packs=len(packs),
            updated=updated,
            metrics=results,
        )

    def _accumulate(
        self, trajectories: Sequence[Trajectory], packs: list[list[int]], objective: Objective, totals: Totals
    ) -> _Sums:
        """Forward and backward of every pack; gradients add up in the optimiser."""
        summed = _Sums(self.policy.device)
        weights = self._batch_weights(trajectories, packs, objective, totals, summed)
        for number, pack in enumerate(packs):
            batch = TokenBatch.build(trajectories, pack, self.policy.device, self._exact)
            if not batch.trained_tokens:
                continue
            self._seed_dropout(number)
            with self._blocks:
                terms = self._terms(batch, objective, totals)
                if weights is None:
                    loss = objective(terms)
                    summed.add(loss)
                    (loss.value * self.optimiser.scaler.scale).backward()
                else:
                    _pull(terms, weights[number], self.optimiser.scaler.scale)
        return summed

    def _batch_weights(
        self,
        trajectories: Sequence[Trajectory],
        packs: list[list[int]],
        objective: Objective,
        totals: Totals,
        summed: _Sums,
    ) -> list[list[torch.Tensor | None]] | None:
        """For an objective over the whole batch: score every pack first, evaluate it once on all of them, and return
        what the loss pulls on each pack's log-probabilities and entropies. None for any other scope."""
        if objective.scope != "batch":
            return None
        leaves: list[Terms] = []
        for number, pack in enumerate(packs):
            batch = TokenBatch.build(trajectories, pack, self.policy.device, self._exact)
            self._seed_dropout(number)
            with torch.no_grad(), self._blocks:
                terms = self._terms(batch, objective, totals)
            terms.logprobs_N.requires_grad_(True)
            if terms.entropy_N is not None:
                terms.entropy_N.requires_grad_(True)
            leaves.append(terms)
        loss = objective(_join(leaves))
        summed.add(loss)
        loss.value.backward()
        return [[t.logprobs_N.grad, None if t.entropy_N is None else t.entropy_N.grad] for t in leaves]

    def _terms(self, batch: TokenBatch, objective: Objective, totals: Totals) -> Terms:
        logprobs, entropy = self.policy.logprobs(batch, temperature=self.temperature, entropy=objective.needs_entropy)
        return Terms(
            logprobs_N=logprobs,
            entropy_N=entropy,
            sequence_N=batch.sequence_N,
            unit_B=batch.unit_B,
            totals=totals,
            tokens=batch.token_fields,
            fields=batch.fields,
        )

    @property
    def _exact(self) -> torch.dtype:
        return torch.float64 if self.policy.head.weight.dtype == torch.float64 else torch.float32

    def _seed_dropout(self, pack: int) -> None:
        if self._has_dropout:
            torch.manual_seed(key(self._seed, "dropout", self.step_count, pack))

    def _shrink(self, trajectories: Sequence[Trajectory], scope: Scope) -> None:
        """Halve the token budget after running out of memory; give up where every pack holds one sequence already."""
        units = len({t.unit for t in trajectories}) if scope == "pair" else len(trajectories)
        if len(plan_packs(trajectories, self.token_budget, scope)) == units:
            raise UserError(
                f"a single sequence of {max(len(t) for t in trajectories)} tokens does not fit into memory",
                fix="write `model.checkpointing: true`, use model.lora, or shorten max_length",
            )
        self.token_budget = max(16, self.token_budget // 2)
        if self.policy.device.type == "cuda":
            torch.cuda.empty_cache()
        self._say(f"out of memory: the token budget is now {self.token_budget}; repeating with the same loss")

    # --- state -------------------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Everything that training changes: tensors by name, and the rest as JSON."""
        tensors, extra = self.optimiser.state()
        return tensors, {"optimiser": extra, "step": self.step_count, "token_budget": self.token_budget}

    def load(self, tensors: Mapping[str, torch.Tensor], extra: Mapping[str, Any]) -> None:
        self.optimiser.load(tensors, extra["optimiser"])
        self.step_count, self.token_budget = int(extra["step"]), int(extra["token_budget"])


class _Sums:
    """Adds up losses and metrics on the device; reads them back once."""

    def __init__(self, device: torch.device):
        self._device = device
        self._sums: dict[str, torch.Tensor] = {}

    def add(self, loss: Loss) -> None:
        self._put("loss", loss.value.detach(), 0.0)
        for name, (value, count) in loss.metrics.items():
            self._put(name, value, count)

    def _put(self, name: str, value: torch.Tensor | float, count: torch.Tensor | float) -> None:
        parts = [torch.as_tensor(x, dtype=torch.float64, device=self._device).detach() for x in (value, count)]
        pair = torch.stack(parts)
        self._sums[name] = self._sums[name] + pair if name in self._sums else pair

    def result(self) -> dict[str, float]:
        """Sums over ranks, each divided by its count; the loss is a sum already."""
        if not self._sums:
            return {"loss": 0.0}
        names = sorted(self._sums)
        table = sum_over_ranks(torch.stack([self._sums[name] for name in names])).tolist()
        return {
            name: value if name == "loss" else value / count if count else 0.0
            for name, (value, count) in zip(names, table, strict=True)
        }


def _global_totals(trajectories: Sequence[Trajectory], device: torch.device) -> Totals:
    own = Totals.of(trajectories)
    summed = torch.tensor([own.tokens, own.sequences, own.units], dtype=torch.float64, device=device)
    return Totals(*sum_over_ranks(summed).tolist())


def _join(parts: Sequence[Terms]) -> Terms:
    """The terms of several packs as one; sequences are numbered through."""
    shifts = np.cumsum([0, *(part.sequences for part in parts)])
    entropies = [part.entropy_N for part in parts if part.entropy_N is not None]
    return Terms(
        logprobs_N=torch.cat([part.logprobs_N for part in parts]),
        entropy_N=torch.cat(entropies) if entropies else None,
        sequence_N=torch.cat([part.sequence_N + int(s) for part, s in zip(parts, shifts, strict=False)]),
        unit_B=torch.cat([part.unit_B for part in parts]),
        totals=parts[0].totals,
        tokens={name: torch.cat([part.tokens[name] for part in parts]) for name in parts[0].tokens},
        fields={name: torch.cat([part.fields[name] for part in parts]) for name in parts[0].fields},
    )


def _pull(terms: Terms, weights: Sequence[torch.Tensor | None], scale: float) -> None:
    """Back-propagate given gradients of log-probabilities and entropies through one pack."""
    outputs = [terms.logprobs_N, terms.entropy_N]
    pairs = [(out, w * scale) for out, w in zip(outputs, weights, strict=True) if out is not None and w is not None]
    torch.autograd.backward([out for out, _ in pairs], [w for _, w in pairs])
