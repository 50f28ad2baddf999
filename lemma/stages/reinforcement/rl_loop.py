"""The reinforcement stage: sample, grade, reinforce the better samples. Read it top to bottom.

A step draws problems, generates groups while the graders work, writes every sample to the journal, assigns advantages,
and updates the policy as often as the algorithm says. Unlike the textbook, groups whose rewards do not differ are not
computed (they still count, so the loss does not change), there is no separate scoring pass if a batch is used once, and
no reference model is kept unless there is a KL term.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial

import numpy as np

from lemma.algorithms import Algorithm
from lemma.core.faults import fault_point
from lemma.core.files import BackgroundWork
from lemma.core.random import permutation
from lemma.core.ranks import is_leader
from lemma.core.types import Group, write_tokens
from lemma.engines.mismatch import MismatchLimit
from lemma.engines.protocol import Engine
from lemma.formats import Format
from lemma.learning.learner import StepReport
from lemma.models.load_model import pick_precision
from lemma.objectives import Totals
from lemma.objectives.objective import count_episode_tokens
from lemma.rollouts import Rollouts
from lemma.rollouts.journal import tidy
from lemma.rollouts.token_notes import NOTES, TokenNotes
from lemma.runs.stage import Stage
from lemma.stages.reference import ModelReference
from lemma.stages.reinforcement.lag_metrics import sample_size, staleness
from lemma.stages.reinforcement.rl_metrics import credited_metrics, rollout_metrics, update_metrics
from lemma.stages.reinforcement.rl_options import ReinforcementOptions
from lemma.stages.reinforcement.rl_parts import RlParts, open_sampling, prepare_parts


def run_reinforcement(stage: Stage, options: ReinforcementOptions, fmt: Format) -> None:
    parts = prepare_parts(stage, options, fmt)
    queue, learner, benchmarks, total = parts.queue, parts.learner, parts.benchmarks, parts.total
    done = stage.resume(learner, total, parts.data)
    with contextlib.ExitStack() as stack:
        stack.callback(queue.close)
        background = stack.enter_context(BackgroundWork())
        stage.before_saving = background.wait
        engine, collector = open_sampling(stage, options, fmt, parts, done, stack)
        queue.use(collector, parts.policy, engine)
        for one in benchmarks:
            one.begin(done, total, engine)
        kept = options.journal.steps
        stage.catch_up(learner, done, total)
        precision = pick_precision(stage.model.precision, parts.policy.device)
        limit = MismatchLimit.of(precision, parts.policy.findings.rounding, options.rollout.temperature)
        for step in range(done + 1, total + 1):
            with stage.clock.measure("generate"):
                rollouts = queue.take(step)
            background.wait()
            if engine.may_sleep and not queue.is_sampling:
                engine.sleep()
            stage.clock.move("generate", "grade", rollouts.grade_seconds)
            batch = [group for group in rollouts.groups if group.trajectories]
            reports, notes = learn(stage, options, parts, step, batch)
            if isinstance(parts.reference, ModelReference):
                parts.reference.after(step)
            if notes is not None and is_leader():
                background.submit(partial(notes.write, collector.folder.with_name(NOTES), step, batch))
            for report in reports:
                stage.clock.add(report)
            if not rollouts.from_journal:  # those were sampled by an earlier process
                stage.clock.sampled += sum(episode.tokens for episode in rollouts.episodes)
            with stage.clock.measure("generate"):
                queue.wait()
            engine.update_weights(step)
            values = metrics_of(options, parts, step, rollouts, batch, reports)
            parts.algorithm.observe(values, parts.memory)
            if not options.rollout.lag or step == 1:
                check_engine(engine, reports, limit)
            if any(one.is_due(step, total) for one in benchmarks):
                queue.drain()
            best = [one.after(step, total, engine) for one in benchmarks]
            show_step(stage, options, parts, step, values | parts.memory.numbers)
            stage.save_if_due(learner, step, total, any(best))
            if is_leader():
                background.submit(partial(tidy, collector.folder, step, kept, stage.store.oldest))
    stage.finish(parts.policy, total, {"steps": total, "problems": len(parts.tasks), "drawn": parts.order.drawn})


def learn(
    stage: Stage, options: ReinforcementOptions, parts: RlParts, step: int, batch: Sequence[Group]
) -> tuple[list[StepReport], TokenNotes | None]:
    """Score, assign advantages, and make all updates of a step; returns their per-token notes, if those are kept."""
    if parts.scores_first:
        with stage.clock.measure("score"):
            add_scores(batch, parts)
    parts.algorithm.assign(batch, parts.memory)
    with_gradient = [group for group in batch if parts.needs_all_groups or has_advantage(group)]
    if not parts.scores_first:
        with stage.clock.measure("score"):
            add_scores(with_gradient, parts)
    fault_point("rl.before_update")
    longest = options.environment.turns * parts.max_tokens
    notes = TokenNotes() if options.journal.notes else None
    with stage.clock.measure("update"):
        reports = update(stage, step, parts, batch, with_gradient, longest, notes)
    return reports, notes


def metrics_of(
    options: ReinforcementOptions,
    parts: RlParts,
    step: int,
    rollouts: Rollouts,
    batch: Sequence[Group],
    reports: Sequence[StepReport],
) -> dict[str, float]:
    """All metrics of a step, except the algorithm's memory."""
    by_verdict = any(reward.needs_verdict for reward in options.rewards)
    values = rollout_metrics(rollouts, batch, by_verdict=by_verdict)
    if type(parts.algorithm).credited is not Algorithm.credited:
        values |= credited_metrics(parts.algorithm, batch)
    values |= {"lr": parts.learner.last_rate, "epoch": parts.order.drawn / len(parts.tasks)} | update_metrics(reports)
    if options.rollout.lag:
        values |= staleness(rollouts, step) | sample_size(values)
    return values | {"mismatch/rounding": parts.policy.findings.rounding}


def show_step(stage: Stage, options: ReinforcementOptions, parts: RlParts, step: int, values: dict[str, float]) -> None:
    """Diagnose a step, write its metrics if due, and show the stage's progress."""
    bottleneck = parts.diagnosis.look(step, values, stage.clock.spent)
    if stage.is_due(options.log_every, step, parts.total):
        stage.measure(step, "train", values, stage.clock.read(parts.policy.device), bottleneck)
    stage.progress(step, parts.total, f"{note_of(values)}, bottleneck {bottleneck}")


# --- parts of the loop ----------------------------------------------------------------------------------


def add_scores(groups: Sequence[Group], parts: RlParts) -> None:
    """Scores of the tokens by the learner, the reference and the critic, before the first update on them."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    if not trajectories:
        return
    if parts.needs_old:
        write_tokens("old", trajectories, parts.learner.score(trajectories))
    if parts.reference is not None:
        write_tokens("reference", trajectories, parts.reference.scores(trajectories))
    if parts.critic is not None:
        write_tokens("value", trajectories, parts.critic.score(trajectories, output="values"))


def has_advantage(group: Group) -> bool:
    return any(np.any(t.token_fields["advantage"][t.loss_mask_T] != 0) for t in group.trajectories)


def update(
    stage: Stage,
    step: int,
    parts: RlParts,
    batch: Sequence[Group],
    with_gradient: Sequence[Group],
    max_tokens: int,
    notes: TokenNotes | None = None,
) -> list[StepReport]:
    """All updates on this batch. Groups that are skipped still count in the totals."""
    algorithm, learner, critic = parts.algorithm, parts.learner, parts.critic
    reports: list[StepReport] = []
    computed = {id(group) for group in with_gradient}
    count_episode_tokens([t for group in with_gradient for t in group.trajectories if t.trained_tokens])
    for epoch in range(algorithm.epochs):
        for groups in mini_batches(stage, step, epoch, algorithm.mini_batches, batch):
            trajectories = [t for group in groups if id(group) in computed for t in group.trajectories]
            trajectories = [t for t in trajectories if t.trained_tokens]
            if not trajectories:
                learner.pass_over(1)
                if critic is not None:
                    critic.pass_over(1)
                continue
            totals = Totals.of([t for group in groups for t in group.trajectories if t.trained_tokens])
            objective = algorithm.objective(max_tokens, parts.memory)
            report = learner.step(trajectories, objective, totals, with_logprobs=notes is not None)
            if notes is not None:
                notes.take(trajectories, report.logprobs)
            if critic is not None:
                value = critic.step(trajectories, algorithm.value_objective(), totals)
                report.metrics.update({f"critic/{name}": x for name, x in value.metrics.items()})
                report.metrics.update({"critic/loss": value.loss, "critic/grad_norm": value.grad_norm})
            reports.append(report)
            fault_point("rl.mid_update")
    return reports


def mini_batches(stage: Stage, step: int, epoch: int, count: int, batch: Sequence[Group]) -> list[list[Group]]:
    """The groups of each mini-batch, dealt out in the order in which they were drawn."""
    drawn = sorted(batch, key=lambda group: group.trajectories[0].group_id)
    shuffled = permutation(len(drawn), stage.seed, stage.name, "mini-batches", step, epoch)
    return [[drawn[i] for i in sorted(part.tolist())] for part in np.array_split(shuffled, count)]


def check_engine(engine: Engine, reports: Sequence[StepReport], limit: MismatchLimit) -> None:
    """Compare the engine's log-probabilities with those of the learner before its first update."""
    difference = reports[0].metrics.get(limit.metric, 0.0) if reports else 0.0
    if not difference <= limit.most:
        limit.refuse(difference, engine.name)


def note_of(values: dict[str, float]) -> str:
    right = f", right {values['right']:.0%}" if "right" in values else ""
    credited = values.get("reward/credited")
    reward = f"{values.get('reward/mean', 0.0):.3f}" + ("" if credited is None else f" (credited {credited:.3f})")
    return f"reward {reward}{right}, length {values.get('length/mean', 0.0):.0f}"
