"""What a reinforcement stage samples with: the engine and its cache, the environments, the collector, the sampling
settings."""

from __future__ import annotations

from dataclasses import replace

from lemma.core.errors import UserError
from lemma.core.ranks import slots
from lemma.engines import make_engine
from lemma.engines.engine_options import EngineOptions, NativeOptions
from lemma.engines.native.engine import BLOCK
from lemma.engines.protocol import Engine, Sampling
from lemma.engines.stop_strings import ends_of
from lemma.formats import Format
from lemma.models.policy import Policy
from lemma.rollouts import ProblemOrder, RolloutCollector, Scorer, World
from lemma.rollouts.open_world import open_world
from lemma.runs.fitted import cache_tokens
from lemma.runs.stage import Stage
from lemma.stages.reinforcement.rl_options import ReinforcementOptions


def make_rollout_engine(
    stage: Stage, options: ReinforcementOptions, policy: Policy, longest: int, evaluated: int, budget: int
) -> Engine:
    """The engine, with a cache as large as the step's samples need, or smaller if that much is not free.

    `longest` and `evaluated` are the longest prompts with their answers, of the step and of the benchmarks;
    `budget` is how many tokens an update computes at a time.
    """
    wanted: EngineOptions = options.rollout.engine
    needed, is_partial = None, options.rollout.lag == "flying"
    servers = options.native_servers
    if isinstance(wanted, NativeOptions) and wanted.cache_gib is None and wanted.cache_tokens is None:
        parts = servers if servers and is_partial else slots()
        rows = min(-(-options.batch.problems // parts) * options.algorithm.group_size, wanted.sequences)
        needed = max(rows * longest, evaluated) + BLOCK * options.batch.problems * options.algorithm.group_size
        if not servers or wanted.shares_gpu:
            needed = cache_tokens(stage, options, policy, needed, budget)
    engine: Engine
    if isinstance(wanted, NativeOptions) and servers:
        from lemma.engines.remote.remote_engine import RemoteEngine

        engine = RemoteEngine(
            policy, stage.seed, wanted, needed, is_partial=is_partial, spent=stage.clock.add_server_seconds
        )
    else:
        wanted = wanted.model_copy(update={"cache_tokens": needed}) if needed is not None else wanted
        engine = make_engine(wanted, policy, stage.seed, stage.emit)
    room = engine.capacity
    if room is not None and evaluated > room:
        engine.close()
        raise UserError(
            f"stage {stage.name}: a benchmark needs {evaluated} tokens of the engine's cache, which holds {room}",
            fix="lower `eval.max_tokens`, or raise `rollout.engine.cache_tokens`",
        )
    return engine


def make_world(
    options: ReinforcementOptions, fmt: Format, policy: Policy, sampling: Sampling, seed: int
) -> World | None:
    """The environments that multi-turn episodes are played in; None if a problem gets a single response."""
    if options.environment.is_single_turn:
        return None
    world = open_world(options.environment, fmt, policy, sampling.stop_ids, seed)
    return replace(world, schedule="free") if options.rollout.lag == "flying" else world


def make_collector(
    stage: Stage,
    options: ReinforcementOptions,
    scorer: Scorer,
    engine: Engine,
    order: ProblemOrder,
    sampling: Sampling,
    world: World | None,
    data: str,
) -> RolloutCollector:
    if world is not None and not world.is_exact:
        stage.say("not bit-exact: turns are sent as their replies come; `environment.schedule: exact` repeats a run")
    return RolloutCollector(
        engine,
        scorer,
        sampling,
        options.algorithm,
        order,
        stage.folder.stage(stage.name) / "journal",
        problems=options.batch.problems,
        further_rounds=options.rounds,
        seed=stage.seed,
        name=stage.name,
        data=data,
        mask_truncated=options.truncated == "mask",
        world=world,
        is_partial=options.rollout.lag == "flying",
    )


def sampling_of(options: ReinforcementOptions, fmt: Format, max_tokens: int, policy: Policy) -> Sampling:
    """The sampling settings; a completion ends at any of the model's end-of-turn tokens."""
    rollout = options.rollout
    return Sampling(
        max_tokens=max_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        min_tokens=rollout.min_tokens,
        stop=(*fmt.stop, *rollout.stop),
        stop_ids=tuple(sorted(ends_of(policy))),
    )
