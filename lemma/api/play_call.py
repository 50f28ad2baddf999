"""Episodes of a recipe's environment, played to be looked at."""

from __future__ import annotations

from typing import Any

from lemma.api.evaluate_call import Device
from lemma.core.events import Sink, silent
from lemma.data.choices import as_asked
from lemma.engines import make_engine, open_engine
from lemma.engines.engine_options import NativeOptions
from lemma.engines.protocol import Engine
from lemma.environments.openings import opened_all
from lemma.evaluation.diagnose import sample_groups
from lemma.models.load_model import build_policy, pick_device
from lemma.recipe import Recipe
from lemma.rollouts import Episode, Scorer, World
from lemma.stages.reinforcement.rl_options import ReinforcementOptions
from lemma.stages.reinforcement.rl_problems import stage_problems
from lemma.stages.reinforcement.sampling_parts import make_world, sampling_of


def played(
    recipe: Recipe,
    options: ReinforcementOptions,
    model: str | None = None,
    count: int = 1,
    seed: int = 0,
    device: Device = "auto",
    sink: Sink = silent,
) -> tuple[list[Episode], Any, World]:
    """One episode of each of the first problems of a stage, by the model of the recipe or another; its tokenizer; and
    the environments, which the caller closes."""
    loaded = stage_problems(options, seed)[:count]
    problems = opened_all(options.environment, [as_asked(problem) for problem in loaded], seed)
    settings = NativeOptions(sequences=min(1024, count))
    engine: Engine
    if model is not None:
        policy, engine = open_engine(model, device, seed, sink, settings)
    else:
        policy = build_policy(recipe.model, pick_device(device), recipe.run.seed)
        engine = make_engine(settings, policy, seed, sink)
    recipe.format.install(policy.tokenizer)
    assert options.rollout.max_tokens is not None, "a stage with an environment limits its turns"
    sampling = sampling_of(options, recipe.format, options.rollout.max_tokens, policy)
    scorer = Scorer(recipe.format, options.rewards, policy.tokenizer, ends=sampling.stop_ids)
    world = make_world(options, recipe.format, policy, sampling, seed)
    assert world is not None
    groups = sample_groups(engine, policy.tokenizer, scorer, sampling, problems, 1, world)
    return [episode for group in groups for episode in group], policy.tokenizer, world
