"""The reinforcement stage: sample, grade, learn from what set the better samples apart. Reads top to bottom.

A step draws problems, generates groups while the graders work, writes every sample to the journal, gives advantages,
and updates the policy as often as the algorithm says. Left out of the textbook: groups whose rewards do not differ are
not computed (they count all the same, so the loss does not change), nothing is scored twice when a batch is used once,
and no reference model is held unless a KL is asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lemma.algorithms import Algorithm, Memory
from lemma.algorithms.parts.signals import write_tokens
from lemma.core.faults import fault_point
from lemma.core.random import permutation
from lemma.core.ranks import is_leader
from lemma.core.types import Group
from lemma.engines.mismatch import Mismatch, check_mismatch
from lemma.engines.protocol import Engine, EngineError
from lemma.formats import Format
from lemma.learning.divergence import check_speaks
from lemma.learning.learner import Learner, StepReport
from lemma.models.critic import build_critic
from lemma.models.load_model import build_policy, pick_precision
from lemma.models.policy import Policy
from lemma.models.throughput import throughput
from lemma.objectives import Totals
from lemma.objectives.objective import count_said
from lemma.rollouts import Judge, ProblemOrder, Roller, Rollouts
from lemma.rollouts.journal_files import tidy
from lemma.runs.stage import Stage
from lemma.stages.dropout import switch_dropout_off
from lemma.stages.fitted import fit_budget
from lemma.stages.reinforcement.diagnosis import Diagnosis
from lemma.stages.reinforcement.lag import Ahead, corrected, lag_metrics, works_beside
from lemma.stages.reinforcement.rl_metrics import rollout_metrics
from lemma.stages.reinforcement.rl_options import ReinforcementOptions
from lemma.stages.reinforcement.rl_tasks import digest_of, prepare_tasks
from lemma.stages.reinforcement.rl_validation import RlBenchmarks
from lemma.stages.reinforcement.speaking import make_roller, make_rollout_engine, make_world, sampling_of
from lemma.stages.trained_prompt import as_trained, systems_of


def run_reinforcement(stage: Stage, options: ReinforcementOptions, fmt: Format) -> None:
    algorithm, memory = corrected(options), Memory()
    policy = build_policy(stage.model, stage.device, stage.seed, stage.start_from)
    fmt.install(policy.tokenizer)
    switch_dropout_off(policy.module, stage)
    tasks, max_tokens, held_out = prepare_tasks(stage, options, fmt, policy)
    trained = as_trained(stage, fmt, policy.tokenizer, systems_of(task.problem for task in tasks))
    order = ProblemOrder(tasks, stage.seed, stage.name)
    total = total_steps(options, len(tasks))
    ahead = Ahead(order, options.rollout.lag, total)
    budget = fit_budget(
        stage, policy, options.batch, options.optim,
        with_engine=True, critic=algorithm.needs_critic, reference=algorithm.needs_reference,
    )  # fmt: skip
    learner = make_learner(stage, options, policy, total, budget)
    critic = make_critic(stage, options, total, budget, policy.recomputed) if algorithm.needs_critic else None
    reference = Reference(stage, policy) if algorithm.needs_reference else None
    diagnosis = Diagnosis(options, max_tokens, stage.warn)
    benchmarks = RlBenchmarks(stage, options, trained, policy, held_out, max_tokens)
    for name, part in (("order", ahead), ("memory", memory), ("critic", critic), ("diagnosis", diagnosis)):
        if part is not None:
            stage.keep(name, part)
    data = digest_of(tasks, max_tokens)
    done = stage.resume(learner, total, data)
    said = options.environment.turns * max_tokens
    longest = min(max(len(task.prompt) for task in tasks) + options.environment.room(max_tokens), policy.context)
    engine = make_rollout_engine(stage, options, policy, longest, benchmarks.longest, learner.token_budget)
    engine.update_weights(done)
    sampling = sampling_of(options, fmt, max_tokens, policy)
    judge = Judge(fmt, options.rewards, policy.tokenizer, ends=sampling.stop_ids)
    world = make_world(options, fmt, policy, sampling, stage.seed)
    roller = make_roller(stage, options, judge, engine, order, sampling, world, data)
    ahead.use(lambda step: sample(roller, step, policy), is_beside=works_beside(engine) and world is None)
    by_verdict = any(reward.needs_verdict for reward in options.rewards)
    try:
        benchmarks.begin(done, total, engine)
        stage.catch_up(learner, done, total)
        for step in range(done + 1, total + 1):
            with stage.clock.measure("generate"):
                rollouts = ahead.take(step)
            if not ahead.is_sampling:
                engine.sleep()
            stage.store.check()
            stage.clock.move("generate", "grade", rollouts.grade_seconds)
            batch = [group for group in rollouts.groups if group.trajectories]
            if algorithm.scores_first:
                with stage.clock.measure("score"):
                    add_scores(batch, algorithm, learner, reference, critic)
            algorithm.assign(batch, memory)
            worth = [group for group in batch if algorithm.needs_dead_groups or has_advantage(group)]
            if not algorithm.scores_first:
                with stage.clock.measure("score"):
                    add_scores(worth, algorithm, learner, reference, critic)
            fault_point("rl.before_update")
            with stage.clock.measure("update"):
                reports = update(stage, step, algorithm, memory, learner, critic, batch, worth, said)
            count_tokens(stage, reports, rollouts)
            with stage.clock.measure("generate"):
                ahead.wait()
            engine.update_weights(step)
            values = (
                rollout_metrics(rollouts, batch, by_verdict=by_verdict)
                | {"lr": learner.last_rate, "epoch": order.epoch}
                | lag_metrics(options.rollout.lag, rollouts, step, update_metrics(reports))
                | {"mismatch/rounding": policy.findings.rounding}
            )
            algorithm.observe(values, memory)
            if not options.rollout.lag or step == 1:
                check_engine(stage, policy, engine, reports, sampling.temperature)
            is_best = benchmarks.after(step, total, engine)
            held_by = diagnosis.look(step, values | memory.numbers, stage.clock.spent)
            if stage.is_due(options.log_every, step, total):
                measure(stage, step, values | memory.numbers, policy, held_by)
            stage.progress(step, total, f"{note_of(values)}, held back by {held_by}")
            stage.save_if_due(learner, step, total, is_best)
            if is_leader():
                tidy(roller.folder, step, options.journal.steps, needed_after=stage.store.oldest)
    finally:
        if world is not None:
            world.close()
        engine.close()
        ahead.close()
    stage.finish(policy, total, {"steps": total, "problems": len(tasks), "drawn": order.drawn})


# --- what the loop is made of ----------------------------------------------------------------------------------


def total_steps(options: ReinforcementOptions, problems: int) -> int:
    if options.steps is not None:
        return options.steps
    return max(1, round((options.epochs or 1.0) * problems / options.batch.problems))


def make_learner(stage: Stage, options: ReinforcementOptions, policy: Policy, total: int, budget: int) -> Learner:
    return Learner(
        policy,
        options.optim,
        token_budget=budget,
        total_steps=total * options.algorithm.updates,
        seed=stage.seed,
        temperature=options.rollout.temperature,
        compile_blocks=stage.model.compile,
        share_prompts=stage.model.share_prompts,
        shard=stage.shard,
        say=stage.warn,
    )


def make_critic(stage: Stage, options: ReinforcementOptions, total: int, budget: int, recomputed: int) -> Learner:
    """A learner of its own for the value model, which begins as a copy of the policy's body."""
    rate = options.algorithm.critic_lr
    critic = build_critic(stage.model, stage.device, stage.seed, stage.start_from, recomputed)
    switch_dropout_off(critic.module, stage)
    return Learner(
        critic,
        options.optim if rate is None else options.optim.model_copy(update={"lr": rate}),
        token_budget=budget,
        total_steps=total * options.algorithm.updates,
        seed=stage.seed,
        share_prompts=stage.model.share_prompts,
        shard=stage.shard,
        say=stage.warn,
    )


@dataclass
class Reference:
    """The model that the stage started from: the policy without its adapter, or a frozen second copy."""

    stage: Stage
    policy: Policy

    def __post_init__(self) -> None:
        self._copy: Policy | None = None
        if not self.policy.is_adapter:
            self._copy = build_policy(self.stage.model, self.stage.device, self.stage.seed, self.stage.start_from)
            for parameter in self._copy.module.parameters():
                parameter.requires_grad_(False)

    @contextlib.contextmanager
    def asked(self) -> Iterator[Policy]:
        if self._copy is not None:
            yield self._copy
        else:
            with self.policy.peft.disable_adapter():
                yield self.policy


def add_scores(
    groups: Sequence[Group],
    algorithm: Algorithm,
    learner: Learner,
    reference: Reference | None,
    critic: Learner | None,
) -> None:
    """What the learner, the reference and the critic say about the tokens before the first update on them."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    if not trajectories:
        return
    if algorithm.needs_old:
        write_tokens("old", trajectories, learner.score(trajectories))
    if reference is not None:
        with reference.asked() as other:
            write_tokens("reference", trajectories, learner.score(trajectories, other))
    if critic is not None:
        write_tokens("value", trajectories, critic.score(trajectories))


def sample(roller: Roller, step: int, policy: Policy) -> Rollouts:
    """What is sampled for a step. An engine that fails because the policy has diverged is not what is to blame."""
    try:
        return roller.step(step)
    except EngineError:
        check_speaks(policy)
        raise


def has_advantage(group: Group) -> bool:
    return any(np.any(t.token_fields["advantage"][t.chosen_T] != 0) for t in group.trajectories)


def update(
    stage: Stage,
    step: int,
    algorithm: Algorithm,
    memory: Memory,
    learner: Learner,
    critic: Learner | None,
    batch: Sequence[Group],
    worth: Sequence[Group],
    max_tokens: int,
) -> list[StepReport]:
    """All updates on this batch. Groups that are not worth computing count in the totals all the same."""
    reports: list[StepReport] = []
    computed = {id(group) for group in worth}
    for epoch in range(algorithm.epochs):
        for groups in mini_batches(stage, step, epoch, algorithm.mini_batches, batch):
            trajectories = [t for group in groups if id(group) in computed for t in group.trajectories]
            trajectories = [t for t in trajectories if t.trained_tokens]
            count_said(trajectories)
            if not trajectories:
                learner.pass_over(1)
                if critic is not None:
                    critic.pass_over(1)
                continue
            totals = Totals.of([t for group in groups for t in group.trajectories if t.trained_tokens])
            report = learner.step(trajectories, algorithm.objective(max_tokens, memory), totals)
            if critic is not None:
                value = critic.step(trajectories, algorithm.value_objective(), totals)
                report.metrics.update({f"critic/{name}": x for name, x in value.metrics.items()})
                report.metrics.update({"critic/loss": value.loss, "critic/grad_norm": value.grad_norm})
            reports.append(report)
            fault_point("rl.mid_update")
    return reports


def mini_batches(stage: Stage, step: int, epoch: int, count: int, batch: Sequence[Group]) -> list[list[Group]]:
    """The groups of each mini-batch, dealt out by the order in which they were drawn."""
    drawn = sorted(batch, key=lambda group: group.trajectories[0].unit)
    shuffled = permutation(len(drawn), stage.seed, stage.name, "mini-batches", step, epoch)
    return [[drawn[i] for i in sorted(part.tolist())] for part in np.array_split(shuffled, count)]


def update_metrics(reports: Sequence[StepReport]) -> dict[str, float]:
    """The means over the updates of a step; largest values where the name says so."""
    values = {
        "updates": float(len(reports)),
        "loss": _mean([r.loss for r in reports]),
        "grad_norm": _mean([r.grad_norm for r in reports]),
        "trained_tokens": float(sum(r.trained_tokens for r in reports)),
        "packs": float(sum(r.packs for r in reports)),
        "updated": _mean([float(r.updated) for r in reports]),
    }
    for name in sorted({name for report in reports for name in report.metrics}):
        known = [report.metrics[name] for report in reports if name in report.metrics]
        values[name] = max(known) if name.endswith("/max") else _mean(known)
    # Engine and learner had the same weights at the first update only.
    return values | {name: reports[0].metrics[name] for name in ("mismatch/mean", "mismatch/max") if name in values}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def check_engine(
    stage: Stage, policy: Policy, engine: Engine, reports: Sequence[StepReport], temperature: float
) -> None:
    """What the engine said about its tokens against what the learner found before it changed anything."""
    metrics = reports[0].metrics if reports else {}
    if "mismatch/mean" in metrics:
        mismatch = Mismatch(metrics["mismatch/mean"], metrics["mismatch/max"], reports[0].trained_tokens)
        precision = pick_precision(stage.model.precision, policy.device)
        check_mismatch(mismatch, precision, engine.name, policy.findings.rounding, temperature)


def count_tokens(stage: Stage, reports: Sequence[StepReport], rollouts: Rollouts) -> None:
    """Add a step's tokens to the clock; those of a journal were sampled in another process's time."""
    stage.clock.tokens += sum(report.tokens for report in reports)
    if not rollouts.from_journal:
        stage.clock.sampled += sum(episode.tokens for episode in rollouts.episodes)


def measure(stage: Stage, step: int, values: dict[str, float], policy: Policy, held_by: str) -> None:
    """Write the numbers of a step, what held it back, and the rates since the last row."""
    tokens, sampled = stage.clock.tokens, stage.clock.sampled
    timings = stage.clock.read()
    timings |= throughput(policy, tokens, timings.get("update_seconds", 0.0))
    if sampled and timings.get("generate_seconds"):
        timings["generated_per_second"] = sampled / timings["generate_seconds"]
    stage.measure(step, "train", values, timings, held_by)


def note_of(values: dict[str, float]) -> str:
    right = values.get("right", 0.0)
    return (
        f"reward {values.get('reward/mean', 0.0):.3f}, right {right:.0%}, length {values.get('length/mean', 0.0):.0f}"
    )
