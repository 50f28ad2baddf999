"""The preference stage: learn which responses are better. Read it top to bottom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from lemma.algorithms.algorithm import AlgorithmState
from lemma.algorithms.preference import PreferenceAlgorithm
from lemma.core.events import Progressed
from lemma.core.types import Trajectory, write_tokens
from lemma.data.cache import cache_folder
from lemma.formats import Format
from lemma.learning.learner import Learner, StepReport
from lemma.models.policy import Policy
from lemma.objectives import Objective
from lemma.objectives.preference import reference_point
from lemma.runs.fitted import fit_budget
from lemma.runs.stage import Stage
from lemma.stages.building import stage_learner, stage_policy, switch_dropout_off
from lemma.stages.preference.examples import Example, Order, check_vocabulary, digest, prepare, trajectory
from lemma.stages.preference.preference_options import PreferenceOptions
from lemma.stages.preference.scores import mismatched, precompute
from lemma.stages.reference import AdaptersOff, ModelReference, ReferenceModel, SecondModel
from lemma.stages.supervised import measure_step
from lemma.stages.trained_prompt import Instructions, as_trained

if TYPE_CHECKING:
    from lemma.stages.evaluating import Measure


def run_preference(stage: Stage, options: PreferenceOptions, fmt: Format) -> None:
    policy = stage_policy(stage)
    fmt.install(policy.tokenizer)
    switch_dropout_off(policy, stage)
    limit = min(options.max_length or policy.context, policy.context)
    with stage.waiting("reading the data"):
        train, held_out = prepare(stage, options, fmt, policy.tokenizer, limit)
    check_vocabulary([*train, *held_out], len(policy.head.weight), stage)
    # With a single response there is no other prompt to estimate KTO's reference point from.
    fewest = 2 if options.algorithm.needs_baseline else 1
    order = Order(len(train), options.batch.examples, stage.seed, stage.name, options.shuffle, fewest)
    total = order.total_steps(options)
    budget = fit_budget(stage, policy, options.batch, options.optim)
    learner = stage_learner(stage, policy, options.optim, budget, total, seed=stage.seed)
    steps = (
        [[train[i] for i in order.batch(index)] for index in range(total)] if options.algorithm.needs_baseline else []
    )
    reference = open_reference(stage, options, policy, learner, [train, held_out], [*steps, held_out], limit)
    scorer = PairScorer(options.algorithm, policy, learner, reference, limit)
    stage.keep("algorithm", scorer.memory)
    asked = Instructions(fmt, policy.tokenizer)
    trained = as_trained(stage, fmt, policy.tokenizer, Counter(asked.of(example.system) for example in train))
    measures: list[Measure] = []
    if held_out or options.eval.benchmarks:
        from lemma.stages.evaluating import stage_measures

        def loss() -> dict[str, float]:
            return of_sides(learner.evaluate(*scorer.ready(held_out)), held_out)

        every = options.validation.every
        measures = stage_measures(stage, options.eval, trained, policy, loss if held_out else None, every)
    start = stage.resume(learner, total, digest([*train, *held_out]))
    for measure in measures:
        measure.begin(start, total)
    stage.catch_up(learner, start, total)
    for step in range(start + 1, total + 1):
        with stage.clock.measure("data"):
            examples = [train[i] for i in order.batch(step - 1)]
        with stage.clock.measure("score"):
            batch, objective = scorer.ready(examples)
        with stage.clock.measure("update"):
            report = scorer.observe(learner.step(batch, objective), examples)
            if isinstance(reference, ModelReference):
                reference.after(step)
        stage.clock.add(report)
        best = [measure.after(step, total) for measure in measures]
        if stage.is_due(options.log_every, step, total):
            measure_step(stage, step, step / order.steps_per_epoch, report, policy)
        note = "".join(measure.note for measure in measures)
        stage.progress(step, total, f"loss {report.loss:.3f}, right {report.metrics['rewards/accuracies']:.2f}{note}")
        stage.save_if_due(learner, step, total, any(best))
    stage.finish(policy, total, {"examples": len(train), "steps": total, "learnt_examples": order.learnt(total)})


def open_reference(
    stage: Stage,
    options: PreferenceOptions,
    policy: Policy,
    learner: Learner,
    examples: Sequence[Sequence[Example]],
    steps: Sequence[Sequence[Example]],
    limit: int,
) -> ReferenceModel | None:
    """The reference that the algorithm needs. Call before the weights change or are loaded from a checkpoint.

    `steps` are the examples of each step: KTO makes its mismatched pairs within each.
    """
    if not options.algorithm.needs_reference:
        return None
    if options.reference == "adapters_off":
        return AdaptersOff(policy, learner)
    second = None if options.reference_model is None else SecondModel(stage, policy, options.reference_model)
    if second is not None and second.options.follows:
        return ModelReference(second, learner)
    wanted = [one for part in examples for one in as_trajectories(part, options.algorithm)]
    if options.algorithm.needs_baseline:
        wanted += [one for together in steps for one in mismatched(together, limit)]
    folder = cache_folder(options.data.cache).with_name("reference")
    with stage.precomputing():
        return precompute(
            policy if second is None else second.model,
            learner,
            wanted,
            folder,
            lambda done, total: stage.emit(Progressed("reference", done, total)),
        )


@dataclass(frozen=True)
class PairScorer:
    """Prepares examples for a step: trajectories with the fields that the objective reads, and the objective itself."""

    algorithm: PreferenceAlgorithm
    policy: Policy
    learner: Learner
    reference: ReferenceModel | None
    limit: int
    memory: AlgorithmState = field(default_factory=AlgorithmState)

    def ready(self, examples: Sequence[Example]) -> tuple[list[Trajectory], Objective]:
        batch = as_trajectories(examples, self.algorithm)
        if self.reference is not None:
            write_tokens("reference", batch, self.reference.scores(batch))
        if self.algorithm.needs_collisions:
            write_tokens("collision", batch, self.learner.score(batch, output="collisions"))
        return batch, self.algorithm.objective(self.memory, self.baseline(examples))

    def observe(self, report: StepReport, examples: Sequence[Example]) -> StepReport:
        """Update the algorithm's memory; returns the report with derived metrics added."""
        self.algorithm.observe(report.metrics, self.memory)
        return replace(report, metrics=of_sides(report.metrics, examples))

    def baseline(self, examples: Sequence[Example]) -> float:
        """KTO's reference point: how much more likely responses to other prompts of the step have become."""
        if not self.algorithm.needs_baseline:
            return 0.0
        assert self.reference is not None
        others = mismatched(examples, self.limit)
        mine, theirs = self.learner.score(others), self.reference.scores(others)
        return float(reference_point(_sums(mine), _sums(theirs)))


def as_trajectories(examples: Sequence[Example], algorithm: PreferenceAlgorithm) -> list[Trajectory]:
    """Every response after its prompt; the two of a pair are one group."""
    whole = algorithm.learns_nll == "all"
    made = []
    for group_id, example in enumerate(examples):
        for response, said, sign in zip(example.responses, example.said, example.signs, strict=True):
            one = trajectory(example, response, said, group_id=group_id, sign=sign, whole=whole and sign > 0)
            if whole:
                of_prompt = np.zeros(len(example.prompt), dtype=np.float32)
                one.token_fields["response"] = np.concatenate([of_prompt, said.astype(np.float32)])
            made.append(one)
    if algorithm.learns_nll != "none":
        marks = [one.loss_mask_T & (one.fields["sign"] > 0) for one in made]
        share = 1.0 / max(1, sum(int(mark.sum()) for mark in marks))
        for one, mark in zip(made, marks, strict=True):
            one.token_fields["nll"] = mark * share
    return made


def of_sides(metrics: dict[str, float], examples: Sequence[Example]) -> dict[str, float]:
    """KTO's sides are counted separately: their margin is the difference of the means, and one may be absent."""
    signs = {sign for example in examples for sign in example.signs}
    absent = {name for name, sign in (("chosen", 1), ("rejected", -1)) if sign not in signs}
    present = {name: value for name, value in metrics.items() if name.rpartition("/")[2] not in absent}
    if absent or "rewards/margins" in present:
        return present
    return present | {"rewards/margins": present["rewards/chosen"] - present["rewards/rejected"]}


def _sums(scores: Sequence[np.ndarray]) -> torch.Tensor:
    return torch.tensor([float(part.sum(dtype=np.float64)) for part in scores], dtype=torch.float64)
