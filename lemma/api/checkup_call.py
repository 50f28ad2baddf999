"""What a model generates as the reinforcement stage of a recipe would have it, and what to change."""

from __future__ import annotations

from dataclasses import replace

from lemma.api.evaluate_call import Device
from lemma.core.errors import UserError, nearest
from lemma.core.events import Sink, silent
from lemma.core.random import permutation
from lemma.core.ranks import leader_first, world_size
from lemma.core.roll_call import check_alike
from lemma.core.types import Problem, content_id
from lemma.data.choices import as_asked
from lemma.data.load_rows import filter_by_length
from lemma.engines import open_engine
from lemma.engines.engine_options import NativeOptions
from lemma.engines.protocol import Sampling
from lemma.evaluation.diagnose import Checkup, Situation, diagnose, sample_groups
from lemma.formats import Format
from lemma.formats.encode import encode_prompt
from lemma.models.model_options import ModelOptions
from lemma.models.policy import Policy
from lemma.models.same_weights import check_same_weights
from lemma.recipe import Recipe
from lemma.rollouts import Episode, Scorer
from lemma.runs.ingredients import ingredients
from lemma.stages.reinforcement.rl_options import ReinforcementOptions
from lemma.stages.reinforcement.rl_problems import stage_problems
from lemma.stages.reinforcement.rl_tasks import opened
from lemma.stages.reinforcement.sampling_parts import make_world, sampling_of

# Tokens of a completion where nothing limits it.
ROOM = 1024


def stage_to_try(recipe: Recipe, wanted: str | None) -> tuple[str, ReinforcementOptions]:
    """The stage to try, by name, else the last one that reinforces, else its defaults on the last stage's data."""
    if wanted is not None and wanted not in recipe.stages:
        raise UserError(f"the recipe has no stage '{wanted}'", fix=nearest(wanted, recipe.stages))
    names = [wanted] if wanted is not None else list(recipe.stages)
    for name in reversed(names):
        stage = recipe.stages[name]
        if isinstance(stage, ReinforcementOptions):
            return name, stage
    data = getattr(recipe.stages[names[-1]], "data", None)
    return "rl", ReinforcementOptions() if data is None else ReinforcementOptions(data=data)


def checkup(
    model: str,
    fmt: Format,
    name: str,
    options: ReinforcementOptions,
    taught: str | None,
    *,
    groups: int = 8,
    group_size: int | None = None,
    temperature: float | None = None,
    max_tokens: int | None = None,
    seed: int = 0,
    device: Device = "auto",
    sink: Sink = silent,
) -> tuple[Checkup, list[list[Episode]], Sampling]:
    """A few groups of the stage of this name, what is found in them, and how they were sampled. `taught` names the
    supervised stage that it builds on."""
    with leader_first("loading the problems"):  # what it downloads, the others find
        loaded = stage_problems(options, seed)
    problems = [opened(options.environment, as_asked(problem), seed) for problem in loaded]
    size = group_size or options.algorithm.group_size
    together = NativeOptions(sequences=min(1024, size * min(groups, len(problems))))
    policy, engine = open_engine(model, device, seed, sink, together)
    fmt.install(policy.tokenizer)
    problems, sampling = _chosen(options, fmt, policy, problems, groups, temperature, max_tokens, seed)
    _check_alike(options, fmt, policy, problems)
    scorer = Scorer(fmt, options.rewards, policy.tokenizer, ends=sampling.stop_ids)
    world = make_world(options, fmt, policy, sampling, seed)
    sampled = sample_groups(engine, policy.tokenizer, scorer, sampling, problems, size, world)
    algorithm = options.algorithm
    situation = Situation(fmt, sampling, policy.tokenizer, f"stages.{name}", policy.context, algorithm.compares, taught)
    return diagnose(sampled, situation), sampled, sampling


def _check_alike(options: ReinforcementOptions, fmt: Format, policy: Policy, problems: list[Problem]) -> None:
    """Refuse ranks that have read something else than the first one."""
    if world_size() == 1:
        return
    check_same_weights(policy.module)
    prompts = [encode_prompt(fmt, problem, policy.tokenizer).tolist() for problem in problems]
    marks = {"the problems": content_id([(p.id, p.golds) for p in problems]), "the prompts": content_id(prompts)}
    check_alike(marks | ingredients(options, ModelOptions(), None, fmt.model_dump(mode="json")))


def _chosen(
    options: ReinforcementOptions,
    fmt: Format,
    policy: Policy,
    problems: list[Problem],
    groups: int,
    temperature: float | None,
    max_tokens: int | None,
    seed: int,
) -> tuple[list[Problem], Sampling]:
    """A few of the problems that the stage would keep, and what it samples with.

    Without a limit of its own, at most 1,024 tokens are generated here.
    """
    lengths = [len(encode_prompt(fmt, problem, policy.tokenizer)) for problem in problems]
    pairs, limit = filter_by_length(list(zip(problems, lengths, strict=True)), lengths, options.data.prompt_length)
    longest = max(length for _, length in pairs) if limit is None else limit
    asked = max_tokens or options.rollout.max_tokens or min(ROOM, policy.context - longest)
    kept = [problem for problem, length in pairs if length <= policy.context - max(asked, 1)]
    if asked < 1 or not kept:
        raise UserError(
            f"prompts of up to {longest} tokens leave no room for {max(asked, 1)} more in the model's context of "
            f"{policy.context}",
            fix="lower data.prompt_length.max_tokens or rollout.max_tokens, or take a model with a longer context",
        )
    if options.rollout.min_tokens > asked:
        raise UserError(
            f"rollout.min_tokens is {options.rollout.min_tokens}, above the {asked} tokens of the longest completion",
            fix="lower rollout.min_tokens or raise --max-tokens",
        )
    sampling = sampling_of(options, fmt, asked, policy)
    if temperature is not None:
        sampling = replace(sampling, temperature=temperature)
    order = permutation(len(kept), seed, "debug", "problems")[:groups]
    return [kept[place] for place in order], sampling
