"""What a reinforcement stage samples with: the engine and its cache, the environments, the collector, the sampling
settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from lemma.core.errors import UserError
from lemma.core.ranks import SpeakerLink, slots, speakers
from lemma.engines import make_engine
from lemma.engines.engine_options import EngineOptions, NativeOptions
from lemma.engines.generator_engine import GeneratorEngine
from lemma.engines.native.engine import BLOCK
from lemma.engines.protocol import Engine, Sampling
from lemma.engines.remote.remote_engine import RemoteEngine
from lemma.engines.speaker_messages import Load
from lemma.engines.stop_strings import ends_of
from lemma.engines.weight_broadcast import layout_of
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
    needed, link, is_partial = None, speakers(), options.rollout.lag == "flying"
    if isinstance(wanted, NativeOptions) and wanted.cache_gib is None and wanted.cache_tokens is None:
        servers = wanted.server_count or (0 if link is None else len(link.ranks))
        parts = servers if servers and is_partial else slots()
        rows = min(-(-options.batch.problems // parts) * options.algorithm.group_size, wanted.sequences)
        needed = max(rows * longest, evaluated) + BLOCK * options.batch.problems * options.algorithm.group_size
    engine: Engine
    if isinstance(wanted, NativeOptions) and wanted.has_own_devices:
        if needed is not None and wanted.shares_gpu:
            needed = cache_tokens(stage, options, policy, needed, budget)
        engine = RemoteEngine(policy, stage.seed, wanted, needed, is_partial=is_partial, spent=_serving_time(stage))
    elif link is not None:
        assert isinstance(wanted, NativeOptions), "a recipe with speakers has the native engine"
        engine = _generator_engine(stage, policy, link, wanted, needed, is_partial)
    else:
        if needed is not None:
            tokens = cache_tokens(stage, options, policy, needed, budget)
            wanted = wanted.model_copy(update={"cache_tokens": tokens})
        engine = make_engine(wanted, policy, stage.seed, stage.emit)
    room = engine.capacity
    if room is not None and evaluated > room:
        engine.close()
        raise UserError(
            f"stage {stage.name}: a benchmark needs {evaluated} tokens of the engine's cache, which holds {room}",
            fix="lower `eval.max_tokens`, or raise `rollout.engine.cache_tokens`",
        )
    return engine


def _generator_engine(
    stage: Stage, policy: Policy, link: SpeakerLink, options: NativeOptions, cache: int | None, is_partial: bool
) -> GeneratorEngine:
    """The engine of the generation-only ranks; the time they take is logged as `speak_seconds`."""
    load = Load(
        stage.model,
        stage.start_from,
        policy.device.type,
        stage.seed,
        options,
        cache,
        layout_of(policy),
        threads=torch.get_num_threads(),
        is_deterministic=torch.are_deterministic_algorithms_enabled(),
    )

    def spent(seconds: float) -> None:
        stage.clock.spent["speak"] = stage.clock.spent.get("speak", 0.0) + seconds

    return GeneratorEngine(policy, link, load, spent, is_partial=is_partial)


def _serving_time(stage: Stage) -> Callable[[float], None]:
    """The time that generation servers take is logged as `server_seconds`."""

    def spent(seconds: float) -> None:
        stage.clock.spent["server"] = stage.clock.spent.get("server", 0.0) + seconds

    return spent


def make_world(
    options: ReinforcementOptions, fmt: Format, policy: Policy, sampling: Sampling, seed: int
) -> World | None:
    """The environments that multi-turn episodes are played in; None if a problem gets a single response."""
    world = open_world(options.environment, fmt, policy, sampling.stop_ids, seed)
    return replace(world, schedule="free") if world is not None and options.rollout.lag == "flying" else world


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
