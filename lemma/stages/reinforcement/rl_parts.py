"""The parts of a reinforcement stage: its learners and data, and what it samples with."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass

from lemma.algorithms import Algorithm, AlgorithmState
from lemma.engines.protocol import Engine
from lemma.formats import Format
from lemma.learning.learner import Learner
from lemma.models.policy import Policy
from lemma.rollouts import ProblemOrder, RolloutCollector, Scorer, Task
from lemma.runs.fitted import fit_budget
from lemma.runs.stage import Stage
from lemma.stages.building import check_tokens, stage_critic, stage_learner, stage_policy, switch_dropout_off
from lemma.stages.evaluating import StageBenchmarks
from lemma.stages.reference import AdaptersOff, ModelReference, live_reference
from lemma.stages.reinforcement.diagnosis import Diagnosis
from lemma.stages.reinforcement.partial_rollout_queue import PartialRolloutQueue
from lemma.stages.reinforcement.rl_options import ReinforcementOptions
from lemma.stages.reinforcement.rl_tasks import digest_of, prepare_tasks
from lemma.stages.reinforcement.rl_validation import stage_benchmarks
from lemma.stages.reinforcement.sampling_parts import make_collector, make_rollout_engine, make_world, sampling_of
from lemma.stages.reinforcement.staleness_queue import StalenessQueue
from lemma.stages.trained_prompt import Instructions, as_trained


@dataclass
class RlParts:
    """Everything that a stage has before sampling starts. `data` is a digest of its training data; what the algorithm
    needs (`needs_old`, `scores_first`, `needs_all_groups`) is asked once."""

    policy: Policy
    algorithm: Algorithm
    memory: AlgorithmState
    tasks: list[Task]
    max_tokens: int
    total: int
    order: ProblemOrder
    queue: StalenessQueue | PartialRolloutQueue
    learner: Learner
    critic: Learner | None
    reference: AdaptersOff | ModelReference | None
    diagnosis: Diagnosis
    benchmarks: list[StageBenchmarks]
    data: str
    needs_old: bool
    scores_first: bool
    needs_all_groups: bool


def prepare_parts(stage: Stage, options: ReinforcementOptions, fmt: Format) -> RlParts:
    """Model, problems, learners and benchmarks; what belongs in a checkpoint is registered with the stage."""
    algorithm = corrected(options)
    policy = stage_policy(stage)
    fmt.install(policy.tokenizer)
    switch_dropout_off(policy, stage)
    with stage.waiting("reading the data"):
        tasks, max_tokens, held_out = prepare_tasks(stage, options, fmt, policy)
    asked = Instructions(fmt, policy.tokenizer)
    systems = Counter(asked.of(task.problem.system) for task in tasks)
    trained = as_trained(stage, fmt, policy.tokenizer, systems)
    total = total_steps(options, len(tasks))
    order = ProblemOrder(tasks, stage.seed, stage.name)
    updates = total * algorithm.updates
    budget = fit_budget(stage, policy, options.batch, options.optim, with_engine=True)
    learner = stage_learner(
        stage, policy, options.optim, budget, updates, seed=stage.seed, temperature=options.rollout.temperature
    )
    parts = RlParts(
        policy=policy,
        algorithm=algorithm,
        memory=AlgorithmState(),
        tasks=tasks,
        max_tokens=max_tokens,
        total=total,
        order=order,
        queue=make_queue(options, order, total),
        learner=learner,
        critic=make_critic(stage, options, updates, budget, policy) if algorithm.needs_critic else None,
        reference=(
            live_reference(stage, policy, learner, options.reference_model) if algorithm.needs_reference else None
        ),
        diagnosis=Diagnosis(options, max_tokens, stage.warn, stage.taught_in),
        benchmarks=(
            stage_benchmarks(stage, options, trained, policy, held_out, max_tokens)
            if options.eval.benchmarks or held_out
            else []
        ),
        data=digest_of(tasks, max_tokens),
        needs_old=algorithm.needs_old,
        scores_first=algorithm.scores_first,
        needs_all_groups=algorithm.needs_all_groups,
    )
    stage.keep("order", parts.queue)
    stage.keep("memory", parts.memory)
    if parts.critic is not None:
        stage.keep("critic", parts.critic)
    stage.keep("diagnosis", parts.diagnosis)
    return parts


def corrected(options: ReinforcementOptions) -> Algorithm:
    """The stage's algorithm; samples of older versions get truncated weights old / behaviour, unless it has its own cap
    or already weights whole samples."""
    algorithm, rollout = options.algorithm, options.rollout
    has_weights = getattr(algorithm, "mismatch_cap", 0.0) is None and getattr(algorithm, "gain", "") != "vespo"
    if not rollout.lag or rollout.lag_cap is None or not has_weights:
        return algorithm
    return algorithm.model_copy(update={"mismatch_cap": rollout.lag_cap})


def make_queue(options: ReinforcementOptions, order: ProblemOrder, total: int) -> StalenessQueue | PartialRolloutQueue:
    rollout = options.rollout
    if rollout.lag == "flying":
        return PartialRolloutQueue(order, rollout.lag_limit, total)
    return StalenessQueue(order, rollout.lag, total)


def open_sampling(
    stage: Stage, options: ReinforcementOptions, fmt: Format, parts: RlParts, done: int, stack: contextlib.ExitStack
) -> tuple[Engine, RolloutCollector]:
    """The engine with the weights after step `done`, and what collects its samples.

    The stack closes them, whatever happens: the engine first, so that sampling that still runs alongside the learner
    fails, and the worlds last, when nobody plays in them any more.
    """
    policy, environment = parts.policy, options.environment
    prompt = max(len(task.prompt) for task in parts.tasks)
    said = parts.max_tokens if environment.is_single_turn else environment.longest_episode(parts.max_tokens)
    longest = min(prompt + said, policy.context)
    budget = parts.learner.token_budget
    sampling = sampling_of(options, fmt, parts.max_tokens, policy)
    world = make_world(options, fmt, policy, sampling, stage.seed)
    if world is not None:
        stack.callback(world.close)
    stack.callback(parts.queue.settle)
    with stage.waiting(options.rollout.engine.start):
        evaluated = max((one.longest for one in parts.benchmarks), default=0)
        engine = make_rollout_engine(stage, options, policy, longest, evaluated, budget)
        stack.callback(engine.close)
        engine.update_weights(done)
    scorer = Scorer(fmt, options.rewards, policy.tokenizer, ends=sampling.stop_ids)
    collector = make_collector(stage, options, scorer, engine, parts.order, sampling, world, parts.data)
    return engine, collector


def total_steps(options: ReinforcementOptions, problems: int) -> int:
    if options.steps is not None:
        return options.steps
    return max(1, round((options.epochs or 1.0) * problems / options.batch.problems))


def make_critic(stage: Stage, options: ReinforcementOptions, updates: int, budget: int, policy: Policy) -> Learner:
    """A learner of its own for the value model, which begins as a copy of the policy's body or of another model's."""
    rate, path = options.algorithm.critic_lr, options.algorithm.critic_path
    if path is not None:
        check_tokens(stage, path, policy.tokenizer, "algorithm.value_path")
    critic = stage_critic(stage, policy.recomputed, path)
    switch_dropout_off(critic, stage)
    optim = options.optim if rate is None else options.optim.model_copy(update={"lr": rate})
    return stage_learner(stage, critic, optim, budget, updates, seed=stage.seed)
