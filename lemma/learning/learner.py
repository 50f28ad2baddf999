"""The learner: log-probabilities and optimisation steps for any objective. It does not know which algorithm it serves.

A step is: plan packs under the token budget; for each pack, forward, objective, backward; then one update. The loss is
a sum over packs divided by counts over the whole step, so the gradient does not depend on the plan. Running out of
memory halves the budget and repeats the step with the same loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from lemma.core.errors import UserError
from lemma.core.random import key
from lemma.core.ranks import gather_over_ranks, rank, sum_over_ranks
from lemma.core.types import Scope, Trajectory
from lemma.learning.divergence import SKIPS_IN_A_ROW, Diverged, are_finite
from lemma.learning.learning_options import OptimOptions
from lemma.learning.optimiser import Optimiser, learning_rate
from lemma.learning.whole_batch import Sums, evaluate_batch, pull
from lemma.models.compiled import CompiledBlocks
from lemma.models.critic import Critic
from lemma.models.packing import TokenBatch, plan_packs
from lemma.models.policy import Policy
from lemma.objectives.objective import Objective, Terms, Totals


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
    """Owns the weights, the optimiser and the token budget. `step_count` counts optimisation steps taken, `skipped` how
    many of the last ones were left out because their gradient was not finite."""

    def __init__(
        self,
        policy: Policy | Critic,
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
        self.is_compiled = compile_blocks
        self.step_count = 0
        self.skipped = 0
        self.optimiser = Optimiser(policy.parameters(), optim)
        self._seed = seed
        self._say = say
        self._has_dropout = any(isinstance(m, torch.nn.Dropout) and m.p > 0 for m in policy.module.modules())
        self._blocks: AbstractContextManager[Any] = CompiledBlocks(policy.backbone) if compile_blocks else nullcontext()

    # --- scoring -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def score(self, trajectories: Sequence[Trajectory], policy: Policy | None = None) -> list[np.ndarray]:
        """Log-probability of each trained token of each trajectory, without gradient and without dropout.

        `policy` is another one to ask, such as a reference, on the same device.
        """
        scores: list[np.ndarray] = [np.empty(0, dtype=np.float32)] * len(trajectories)
        asked = policy or self.policy
        asked.module.eval()

        def work(batch: TokenBatch) -> None:
            if not batch.trained_tokens:
                return
            logprobs, _ = asked.logprobs(batch, temperature=self.temperature)
            sizes = torch.bincount(batch.sequence_N, minlength=len(batch.index_B)).tolist()
            for index, part in zip(batch.index_B, logprobs.cpu().split(sizes), strict=True):
                scores[index] = part.numpy()

        self._without_gradient(trajectories, "token", work)
        return scores

    @torch.no_grad()
    def evaluate(self, trajectories: Sequence[Trajectory], objective: Objective) -> dict[str, float]:
        """The objective's loss and metrics on held-out trajectories, without gradient and without dropout."""
        totals = _over_ranks(Totals.of(trajectories), self.policy.device)
        terms: list[Terms] = []
        self._without_gradient(
            trajectories, objective.scope, lambda batch: terms.append(self._terms(batch, objective, totals))
        )
        summed = Sums(self.policy.device)
        if objective.scope == "batch":
            evaluate_batch(terms, objective, summed)
        else:
            for part in terms:
                summed.add(objective(part))
        return summed.result()

    def _without_gradient(
        self, trajectories: Sequence[Trajectory], scope: Scope, work: Callable[[TokenBatch], None]
    ) -> None:
        """Do `work` on packs that hold every trajectory once; out of memory goes on with smaller ones."""
        self.policy.module.eval()
        todo = list(range(len(trajectories)))
        while todo:
            done: set[int] = set()
            tried: list[int] = []
            ran_out = False
            try:
                for pack in plan_packs([trajectories[i] for i in todo], self.token_budget, scope):
                    tried = [todo[i] for i in pack]
                    work(TokenBatch.build(trajectories, tried, self.policy.device, self._exact))
                    done.update(tried)
            except torch.OutOfMemoryError:
                ran_out = True
            if ran_out:
                self._shrink([trajectories[i] for i in tried], scope)
            todo = [i for i in todo if i not in done]

    # --- learning ----------------------------------------------------------------------------------------------

    def step(
        self, trajectories: Sequence[Trajectory], objective: Objective, totals: Totals | None = None
    ) -> StepReport:
        """One optimisation step on all of these trajectories (of this rank; counts are summed over ranks).

        `totals` counts this rank's trajectories where some that carry no gradient were left out.
        """
        self.policy.module.train()
        totals = _over_ranks(totals or Totals.of(trajectories), self.policy.device)
        while True:
            self.optimiser.zero()
            packs = plan_packs(trajectories, self.token_budget, objective.scope)
            work = _Work(trajectories, packs, objective, totals, Sums(self.policy.device))
            if objective.scope == "batch":
                if not self._fits(work, self._score_packs):
                    continue
                evaluate_batch(work.leaves, objective, work.summed)
            if self._fits(work, self._accumulate):
                break
        rate = learning_rate(self.optim, self.step_count, self.total_steps)
        norm, updated = self._update(rate)
        self.step_count += 1
        results = work.summed.result()
        self._check_health(updated, rate, results["loss"])
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

    @property
    def last_rate(self) -> float:
        """The learning rate of the last step, also where it had nothing to learn from."""
        return learning_rate(self.optim, max(0, self.step_count - 1), self.total_steps)

    def pass_over(self, steps: int) -> None:
        """Count optimisation steps that had nothing to learn from, so that the schedule goes on."""
        self.step_count += steps

    def _update(self, rate: float) -> tuple[float, bool]:
        try:
            norm, updated = self.optimiser.step(rate)
        except torch.OutOfMemoryError as error:
            raise UserError(
                "the state of the optimiser does not fit into memory",
                fix="use model.lora, or write `optim.name: adamw_8bit`",
            ) from error
        if not updated and not self.optimiser.scaler.enabled:
            self._say(f"step {self.step_count + 1}: the gradient is not finite; the weights stay as they were")
        return norm, updated

    def _check_health(self, updated: bool, rate: float, loss: float) -> None:
        """Stop where the weights are not finite any more, or gradients in a row are not."""
        whose = "critic" if isinstance(self.policy, Critic) else "model"
        if updated and not are_finite(self.optimiser.parameters.values()):
            raise Diverged(
                f"update {self.step_count}, at a rate of {rate:g}, made weights of the {whose} infinite or NaN"
            )
        scaler = self.optimiser.scaler
        searching = scaler.enabled and scaler.scale > 1.0 and math.isfinite(loss)  # fp16 looks for its scale
        self.skipped = 0 if updated else self.skipped + (not searching)
        if self.skipped >= SKIPS_IN_A_ROW:
            raise Diverged(f"{self.skipped} updates of the {whose} in a row had a gradient that is not finite")

    def _accumulate(self, work: _Work) -> None:
        """Forward and backward of every pack; gradients add up in the optimiser."""
        scale = self.optimiser.scaler.scale
        for number, batch in self._batches(work):
            with self._blocks:
                terms = self._terms(batch, work.objective, work.totals)
                if work.objective.scope == "batch":
                    pull(terms, work.leaves[number], scale)
                else:
                    loss = work.objective(terms)
                    work.summed.add(loss)
                    (loss.value * scale).backward()

    def _score_packs(self, work: _Work) -> None:
        """The first pass of an objective over the whole batch: what it sees of each pack, as leaves."""
        for _, batch in self._batches(work):
            with torch.no_grad(), self._blocks:
                terms = self._terms(batch, work.objective, work.totals)
            terms.logprobs_N.requires_grad_(True)
            if terms.entropy_N is not None:
                terms.entropy_N.requires_grad_(True)
            work.leaves.append(terms)

    def _batches(self, work: _Work) -> Iterator[tuple[int, TokenBatch]]:
        """The packs one after the other, each with its own dropout."""
        for number, pack in enumerate(work.packs):
            work.tried = pack
            if self._has_dropout:
                torch.manual_seed(key(self._seed, "dropout", self.step_count, rank(), number))
            yield number, TokenBatch.build(work.trajectories, pack, self.policy.device, self._exact)

    def _terms(self, batch: TokenBatch, objective: Objective, totals: Totals) -> Terms:
        if batch.trained_tokens:
            logprobs, entropy = self.policy.logprobs(
                batch, temperature=self.temperature, entropy=objective.needs_entropy
            )
        else:  # nothing to predict, but the sequences count
            logprobs = torch.zeros(0, dtype=self._exact, device=self.policy.device, requires_grad=True)
            entropy = torch.zeros_like(logprobs) if objective.needs_entropy else None
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

    def _fits(self, work: _Work, part: Callable[[_Work], None]) -> bool:
        """Do a part of the work. False where memory ran out, here or on another rank; the budget is then smaller."""
        ran_out = False
        try:
            part(work)
        except torch.OutOfMemoryError:
            ran_out = True
        tried = [work.trajectories[i] for i in work.tried]
        trouble = gather_over_ranks((ran_out, ran_out and _is_one_unit(tried, work.objective.scope)))
        if ran_out:
            self._shrink(tried, work.objective.scope)
        elif any(alone for _, alone in trouble):
            raise UserError("another rank ran out of memory on a single sequence", fix="see what that rank says")
        return not any(out for out, _ in trouble)

    def _shrink(self, tried: Sequence[Trajectory], scope: Scope) -> None:
        """Halve the token budget until what ran out of memory does not fit into one pack any more."""
        size = sum(len(t) for t in tried)
        if _is_one_unit(tried, scope):
            what = "sequence" if len(tried) == 1 else f"unit of {len(tried)} sequences"
            raise UserError(
                f"a single {what} of {size} tokens does not fit into memory",
                fix="write `model.checkpointing: true`, use model.lora, or shorten max_length",
            )
        while self.token_budget >= size:
            self.token_budget //= 2
        if self.policy.device.type == "cuda":
            torch.cuda.empty_cache()
        self._say(f"out of memory: the token budget is now {self.token_budget}; repeating with the same loss")

    # --- state -------------------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Everything that training changes: tensors by name, and the rest as JSON."""
        tensors, extra = self.optimiser.state()
        counts = {"step": self.step_count, "skipped": self.skipped, "token_budget": self.token_budget}
        return tensors, {"optimiser": extra, **counts}

    def load(self, tensors: Mapping[str, torch.Tensor], extra: Mapping[str, Any]) -> None:
        self.optimiser.load(tensors, extra["optimiser"])
        self.step_count, self.token_budget = int(extra["step"]), int(extra["token_budget"])
        self.skipped = int(extra.get("skipped", 0))


@dataclass
class _Work:
    """One attempt at a step: its packs, what was found of them so far, and the pack that was tried last."""

    trajectories: Sequence[Trajectory]
    packs: list[list[int]]
    objective: Objective
    totals: Totals
    summed: Sums
    leaves: list[Terms] = field(default_factory=list)
    tried: list[int] = field(default_factory=list)


def _is_one_unit(trajectories: Sequence[Trajectory], scope: Scope) -> bool:
    """Whether the packer cannot take these apart."""
    return len({t.unit for t in trajectories}) == 1 if scope == "pair" else len(trajectories) == 1


def _over_ranks(own: Totals, device: torch.device) -> Totals:
    summed = torch.tensor([own.tokens, own.sequences, own.units], dtype=torch.float64, device=device)
    return Totals(*sum_over_ranks(summed).tolist())
