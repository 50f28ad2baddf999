"""The learner: log-probabilities and optimisation steps for any objective. It does not know which algorithm it serves.

A step is: plan packs under the token budget; for each pack, forward, objective, backward; then one update. The loss is
a sum over packs divided by counts over the whole step, so the gradient does not depend on the plan. Running out of
memory halves the budget and repeats the step with the same loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from lemma.core.errors import UserError
from lemma.core.random import key
from lemma.core.ranks import gather_over_ranks, own_slots, world_size
from lemma.core.types import Output, Scope, Trajectory
from lemma.learning.divergence import SKIPS_IN_A_ROW, Diverged
from lemma.learning.learning_options import OptimOptions
from lemma.learning.optimiser import Optimiser, Split, learning_rate
from lemma.learning.optimiser_state import load_optimiser, optimiser_state
from lemma.learning.passes import Sums, TokenScores, by_all_ranks, deal_packs, is_one_group
from lemma.learning.split_optimiser import SplitOptimiser
from lemma.learning.split_passes import first_pass
from lemma.learning.whole_batch import evaluate_batch, pull
from lemma.models.compiled import CompiledBlocks
from lemma.models.critic import Critic
from lemma.models.flash_attention import agree_on_flash
from lemma.models.packing import TokenBatch, plan_packs
from lemma.models.policy import PackModel
from lemma.models.sharing import can_share, shared_size, spread_cost
from lemma.models.update_flops import flops_per_row
from lemma.objectives.objective import LossInputs, Objective, Totals

T = TypeVar("T")
# Trajectories that were computed, and those of the pack that ran out of memory.
_Done = tuple[list[int], list[int]]


@dataclass(frozen=True)
class StepReport:
    """What one optimisation step did. `metrics` are the objective's, each a sum over its count; `logprobs`, where they
    were asked for, those of each trajectory's trained tokens as the step found them."""

    loss: float
    grad_norm: float
    lr: float
    tokens: int
    trained_tokens: int
    packs: int
    updated: bool
    flops: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    logprobs: list[np.ndarray] = field(default_factory=list, repr=False)


class Learner:
    """Owns the weights, the optimiser and the token budget. Every rank gets all trajectories and plans the same packs;
    it computes those of its slots. `step_count` counts optimisation steps taken, `skipped` how
    many of the last ones were left out because their gradient was not finite."""

    def __init__(
        self,
        policy: PackModel,
        optim: OptimOptions,
        *,
        token_budget: int,
        total_steps: int,
        seed: int = 0,
        temperature: float = 1.0,
        compile_blocks: bool = False,
        may_flash: bool = True,
        share_prompts: bool | None = None,
        shard: Split = "none",
        say: Callable[[str], None] = lambda text: None,
    ):
        self.policy, self._flops = policy, flops_per_row(policy)
        self.optim = optim
        self.token_budget = min(gather_over_ranks(token_budget, "the token budget"))
        self.total_steps = total_steps
        self.temperature = temperature
        self.is_compiled = compile_blocks
        self.step_count = self.skipped = 0
        self.last_rate = 0.0
        """The learning rate of the last step, also where it had nothing to learn from."""
        is_split = shard == "weights" and world_size() > 1
        self.optimiser = SplitOptimiser(policy, optim) if is_split else Optimiser(policy.parameters(), optim, shard)
        agree_on_flash(may_flash and not compile_blocks, say, lambda: first_pass(policy))
        # Ranks that make a pass together cannot leave it one by one.
        self._retried = () if policy.is_split else (torch.OutOfMemoryError,)
        self._seed, self._say = seed, say
        self._exact = torch.float64 if policy.head.weight.dtype == torch.float64 else torch.float32
        self._has_dropout = bool(policy.dropouts)
        wants_sharing = policy.device.type == "cuda" if share_prompts is None else share_prompts
        may_share = wants_sharing and not self._has_dropout and can_share(policy.module)
        self.shares = spread_cost(policy.backbone.config, policy.dtype, policy.device) if may_share else None
        self._built = partial(TokenBatch.build, device=policy.device, dtype=self._exact, share=self.shares is not None)
        self._blocks: AbstractContextManager[Any] = CompiledBlocks(policy.backbone) if compile_blocks else nullcontext()

    # --- scoring -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def score(
        self, trajectories: Sequence[Trajectory], model: PackModel | None = None, *, output: Output = "logprobs"
    ) -> list[np.ndarray]:
        """An output for each trained token of each trajectory, without gradient and without dropout.

        `model` is another one to ask, such as a reference, on the same device.
        """
        asked = model or self.policy
        asked.module.eval()
        scores = TokenScores()

        def work(batch: TokenBatch) -> None:
            if batch.trained_tokens:
                scores.add(batch, asked.outputs(batch, (output,), temperature=self.temperature)[output])

        self._without_gradient(trajectories, "token", work, asked)
        return scores.by_trajectory(len(trajectories))

    @torch.no_grad()
    def evaluate(self, trajectories: Sequence[Trajectory], objective: Objective) -> dict[str, float]:
        """The objective's loss and metrics on held-out trajectories, without gradient and without dropout."""
        totals = Totals.of(trajectories)
        terms = self._without_gradient(
            trajectories, objective.scope, lambda batch: self._terms(batch, objective, totals)
        )
        summed = Sums(self.policy.device)
        if objective.scope == "batch":
            evaluate_batch(terms, objective, summed)
        else:
            for number, part in terms.items():
                summed.add(number, objective(part))
        return summed.result()

    def _without_gradient(
        self,
        trajectories: Sequence[Trajectory],
        scope: Scope,
        work: Callable[[TokenBatch], T],
        asked: PackModel | None = None,
    ) -> dict[int, T]:
        """What `work` says of each of this rank's packs; those of all ranks hold every trajectory once. Where memory
        runs out on any rank, all go on with smaller packs."""
        self.policy.module.eval()
        todo = list(range(len(trajectories)))
        results: dict[int, T] = {}
        first = 0
        while todo:
            packs = [
                [todo[i] for i in pack]
                for pack in plan_packs([trajectories[i] for i in todo], self.token_budget, scope, self.shares)
            ]
            mine = [number for slot in own_slots() for number in deal_packs(packs, trajectories)[slot]]

            def own_part(mine: Sequence[int] = mine, packs: Sequence[list[int]] = packs, first: int = first) -> _Done:
                done: list[int] = []
                for number in mine:
                    try:
                        results[first + number] = work(self._built(trajectories, packs[number]))
                    except self._retried:
                        return done, packs[number]
                    done += packs[number]
                return done, []

            outcomes = by_all_ranks(own_part, "packs without a gradient", asked or self.policy, packs, trajectories)
            if ran_out := [[trajectories[i] for i in tried] for _, tried in outcomes if tried]:
                self._shrink(ran_out, scope)
            gone = {i for done, _ in outcomes for i in done}
            todo, first = [i for i in todo if i not in gone], first + len(packs)
        return results

    # --- learning ----------------------------------------------------------------------------------------------

    def step(
        self,
        trajectories: Sequence[Trajectory],
        objective: Objective,
        totals: Totals | None = None,
        *,
        with_logprobs: bool = False,
    ) -> StepReport:
        """One optimisation step on all of these trajectories, the same on every rank.

        `totals` counts all of the step's where some that carry no gradient were left out.
        """
        self.policy.module.train()
        totals = totals or Totals.of(trajectories)
        while True:
            self.optimiser.zero()
            packs = plan_packs(trajectories, self.token_budget, objective.scope, self.shares)
            work = _Work(trajectories, packs, objective, totals, Sums(self.policy.device))
            work.scores = TokenScores() if with_logprobs else None
            if objective.scope == "batch":
                if not self._fits(work, self._score_packs):
                    continue
                evaluate_batch(work.leaves, objective, work.summed)
            in_rounds = self.optimiser.shard == "gradients"
            if self._accumulate_in_rounds(work) if in_rounds else self._fits(work, self._accumulate):
                break
        rate = learning_rate(self.optim, self.step_count, self.total_steps)
        norm, updated = self._update(rate)
        self.step_count, self.last_rate = self.step_count + 1, rate
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
            flops=work.flops,
            metrics=results,
            logprobs=work.scores.by_trajectory(len(trajectories)) if work.scores is not None else [],
        )

    def pass_over(self, steps: int) -> None:
        """Count optimisation steps that had nothing to learn from, so that the schedule goes on."""
        self.step_count += steps
        self.last_rate = learning_rate(self.optim, max(0, self.step_count - 1), self.total_steps)

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
        if updated and not self.optimiser.is_finite():
            raise Diverged(
                f"update {self.step_count}, at a rate of {rate:g}, made weights of the {whose} infinite or NaN"
            )
        scaler = self.optimiser.scaler
        searching = scaler.enabled and scaler.scale > 1.0 and math.isfinite(loss)  # fp16 looks for its scale
        self.skipped = 0 if updated else self.skipped + (not searching)
        if self.skipped >= SKIPS_IN_A_ROW:
            raise Diverged(f"{self.skipped} updates of the {whose} in a row had a gradient that is not finite")

    def _accumulate(self, work: _Work) -> None:
        """Forward and backward of this rank's packs, slot by slot; gradients add up in the optimiser."""
        dealt = deal_packs(work.packs, work.trajectories)
        for slot in own_slots():
            for number in dealt[slot]:
                self._learn_from(work, number)
            self.optimiser.end_slot(slot)

    def _accumulate_in_rounds(self, work: _Work) -> bool:
        """The same where gradients go home after every round: one pack of each slot, or none where it has no more."""
        dealt = deal_packs(work.packs, work.trajectories)

        def one_round(number: int) -> Callable[[_Work], None]:
            def learn(work: _Work) -> None:
                for slot in own_slots():
                    if number < len(dealt[slot]):
                        self._learn_from(work, dealt[slot][number])
                    self.optimiser.end_slot(slot)

            return learn

        for number in range(max(map(len, dealt), default=0)):
            if not self._fits(work, one_round(number)):
                return False
            self.optimiser.end_round()
        return True

    def _learn_from(self, work: _Work, number: int) -> None:
        scale = self.optimiser.scaler.scale
        batch = self._batch(work, number)
        with self._blocks:
            terms = self._terms(batch, work.objective, work.totals)
            if work.scores is not None:
                work.scores.add(batch, terms.logprobs_N)
            if work.objective.scope == "batch":
                pull(terms, work.leaves[number], scale)
            else:
                loss = work.objective(terms)
                work.summed.add(number, loss)
                (loss.value * scale).backward()
        work.flops += len(batch.ids_T) * self._flops[0] + batch.trained_tokens * self._flops[1]

    def _score_packs(self, work: _Work) -> None:
        """The first pass of an objective over the whole batch: what it sees of each pack, as leaves."""
        dealt = deal_packs(work.packs, work.trajectories)
        for number in [number for slot in own_slots() for number in dealt[slot]]:
            batch = self._batch(work, number)
            with torch.no_grad(), self._blocks:
                terms = self._terms(batch, work.objective, work.totals)
            for output in terms.outputs.values():
                output.requires_grad_(True)
            work.leaves[number] = terms

    def _batch(self, work: _Work, number: int) -> TokenBatch:
        """A pack, with its own dropout from here on, whoever computes it."""
        work.tried = work.packs[number]
        if self._has_dropout:
            torch.manual_seed(key(self._seed, "dropout", self.step_count, 0, number))
        return self._built(work.trajectories, work.tried)

    def _terms(self, batch: TokenBatch, objective: Objective, totals: Totals) -> LossInputs:
        if batch.trained_tokens:
            outputs = self.policy.outputs(batch, objective.outputs, temperature=self.temperature)
        else:  # nothing to predict, but the sequences count
            outputs = {name: self._nothing(name) for name in objective.outputs}
        return LossInputs(
            outputs=outputs,
            sequence_N=batch.sequence_N,
            group_B=batch.group_B,
            totals=totals,
            tokens=batch.token_fields,
            fields=batch.fields,
        )

    def _nothing(self, name: Output) -> torch.Tensor:
        """An output of no tokens."""
        shape = (0, self.policy.head.weight.shape[1]) if name == "hidden" else (0,)
        return torch.zeros(shape, dtype=self._exact, device=self.policy.device, requires_grad=True)

    def _fits(self, work: _Work, part: Callable[[_Work], None]) -> bool:
        """Do this rank's part of the work. False where memory ran out on any rank; the budget is then smaller."""

        def own_part() -> list[int]:
            try:
                part(work)
            except self._retried:
                return work.tried
            return []

        learns, place = part != self._score_packs, "the gradients of a step"
        tries = by_all_ranks(own_part, place, self.policy, work.packs, work.trajectories, learns=learns)
        if ran_out := [[work.trajectories[i] for i in tried] for tried in tries if tried]:
            self._shrink(ran_out, work.objective.scope)
        return not ran_out

    def _shrink(self, packs: Sequence[Sequence[Trajectory]], scope: Scope) -> None:
        """Halve the token budget until none of these, which ran out of memory, fits into one pack any more."""
        for tried in packs:
            size = shared_size(tried, range(len(tried)), self.shares) if self.shares else sum(len(t) for t in tried)
            if is_one_group(tried, scope):
                what = "sequence" if len(tried) == 1 else "pair of sequences"
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
        tensors, extra = optimiser_state(self.optimiser)
        counts = {"step": self.step_count, "skipped": self.skipped, "token_budget": self.token_budget}
        return tensors, {"optimiser": extra, **counts}

    def load(self, tensors: Mapping[str, torch.Tensor], extra: Mapping[str, Any]) -> None:
        load_optimiser(self.optimiser, tensors, extra["optimiser"])
        self.step_count, self.skipped = int(extra["step"]), int(extra.get("skipped", 0))
        here, saved = self.token_budget, int(extra["token_budget"])
        # The saved one, so that the same packs are computed; but not more than fits on this device.
        self.token_budget = min(here, saved)
        if here < saved:
            self._say(f"the token budget was {saved}, and {here} fit here: from now on sums are rounded otherwise")


@dataclass
class _Work:
    """One attempt at a step: its packs, what was found of them so far, and the pack that was tried last."""

    trajectories: Sequence[Trajectory]
    packs: list[list[int]]
    objective: Objective
    totals: Totals
    summed: Sums
    leaves: dict[int, LossInputs] = field(default_factory=dict)
    tried: list[int] = field(default_factory=list)
    flops: float = 0.0
    scores: TokenScores | None = None
