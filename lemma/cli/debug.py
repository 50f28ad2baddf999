"""`lemma debug MODEL --recipe R`: what a model generates under a recipe's sampling settings, and what to change."""

from __future__ import annotations

import argparse
import json
import math
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lemma.cli.parser import Parser, add_device, add_overrides, add_ranks
from lemma.core.errors import UserError, nearest
from lemma.core.events import Event, Said, silent

if TYPE_CHECKING:
    from lemma.core.types import Problem
    from lemma.engines.protocol import Sampling
    from lemma.evaluation.diagnose import Checkup
    from lemma.formats import Format
    from lemma.models.policy import Policy
    from lemma.recipe import Recipe
    from lemma.rollouts import Episode
    from lemma.stages.reinforcement.rl_options import ReinforcementOptions

DESCRIPTION = """\
Generate a few groups as the reinforcement stage of a recipe would, and say in words what is good and what is not:
diversity, format, truncation, how completions end, rewards, entropy, tokenisation, and what to change. A recipe without
such a stage is tried with that stage's defaults on the data of its last stage. MODEL is a run, a model folder, an
adapter folder, a GGUF file or a hub name; a run brings its own recipe."""
ROOM = 1024
SHOWN = 600


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    parser = subparsers.add_parser("debug", help="look into what a model generates", description=DESCRIPTION)
    parser.add_argument(
        "model", metavar="MODEL", help="a run, a model folder, an adapter folder, a GGUF file or a hub name"
    )
    parser.add_argument("--recipe", metavar="RECIPE", help="whose format, data, rewards and sampling to use")
    parser.add_argument("--stage", metavar="NAME", help="which stage of the recipe (default: the last of kind rl)")
    parser.add_argument("--groups", metavar="N", type=int, default=8, help="how many problems (default: 8)")
    parser.add_argument("--group-size", metavar="N", type=int, help="samples of each, in place of the recipe's")
    parser.add_argument("--temperature", metavar="T", type=float, help="sampling temperature, in place of the recipe's")
    parser.add_argument("--max-tokens", metavar="N", type=int, help="longest completion, in place of the recipe's")
    parser.add_argument("--show", metavar="N", type=int, default=2, help="completions to print (default: 2)")
    parser.add_argument("--seed", metavar="S", type=int, default=0, help="another seed, other problems (default: 0)")
    add_device(parser)
    add_ranks(parser, "problems")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write numbers and findings to this file")
    add_overrides(parser, "replace a value of the recipe, such as stages.rl.rollout.top_p=0.9; may be repeated")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    for name, least in (("groups", 1), ("group_size", 1), ("max_tokens", 1), ("temperature", 0), ("show", 0)):
        value = getattr(args, name)
        if value is not None and not least <= value < math.inf:
            raise UserError(f"--{name.replace('_', '-')} is {value}", fix=f"write {least} or more")
    from lemma.cluster.rank_program import on_ranks
    from lemma.runs.run_options import taught_in

    recipe = _recipe(args)
    name, options = _stage(recipe, args.stage)
    settings = recipe.shared_settings()
    work = partial(_debug, args, recipe.format, name, options, taught_in(recipe.stages, name))
    return on_ranks(work, args.arguments, args.ranks, args.device, is_shared=False, settings=settings)


def _recipe(args: argparse.Namespace) -> Recipe:
    from lemma.recipe import load_recipe

    own = Path(args.model).expanduser() / "recipe.yaml"
    if args.recipe is None and not own.is_file():
        raise UserError("there is no recipe", fix="name one with --recipe, or give a run folder as MODEL")
    return load_recipe(args.recipe if args.recipe is not None else own, args.overrides)


def _stage(recipe: Recipe, wanted: str | None) -> tuple[str, ReinforcementOptions]:
    """The stage to try, by name, else the last one that reinforces, else its defaults on the last stage's data."""
    from lemma.stages.reinforcement.rl_options import ReinforcementOptions

    if wanted is not None and wanted not in recipe.stages:
        raise UserError(f"the recipe has no stage '{wanted}'", fix=nearest(wanted, recipe.stages))
    names = [wanted] if wanted is not None else list(recipe.stages)
    for name in reversed(names):
        stage = recipe.stages[name]
        if isinstance(stage, ReinforcementOptions):
            return name, stage
    data = getattr(recipe.stages[names[-1]], "data", None)
    return "rl", ReinforcementOptions() if data is None else ReinforcementOptions(data=data)


def _debug(args: argparse.Namespace, fmt: Format, name: str, options: ReinforcementOptions, taught: str | None) -> int:
    from lemma.core.ranks import is_leader, leader_first
    from lemma.data.choices import as_asked
    from lemma.engines import open_engine
    from lemma.engines.engine_options import NativeOptions
    from lemma.evaluation.diagnose import Situation, diagnose, sample_groups
    from lemma.rollouts import Judge
    from lemma.stages.reinforcement.rl_problems import stage_problems
    from lemma.stages.reinforcement.rl_tasks import opened
    from lemma.stages.reinforcement.speaking import make_world

    with leader_first("loading the problems"):  # what it downloads, the others find
        loaded = stage_problems(options, args.seed)
    problems = [opened(options.environment, as_asked(problem), args.seed) for problem in loaded]
    size = args.group_size or options.algorithm.group_size
    together = NativeOptions(sequences=min(1024, size * min(args.groups, len(problems))))
    policy, engine = open_engine(args.model, args.device, args.seed, _say if is_leader() else silent, together)
    fmt.install(policy.tokenizer)
    problems, sampling = _chosen(args, options, fmt, policy, problems)
    _check_alike(options, fmt, policy, problems)
    judge = Judge(fmt, options.rewards, policy.tokenizer, ends=sampling.stop_ids)
    world = make_world(options, fmt, policy, sampling, args.seed)
    groups = sample_groups(engine, policy.tokenizer, judge, sampling, problems, size, world)
    if not is_leader():
        return 0
    algorithm = options.algorithm
    situation = Situation(fmt, sampling, policy.tokenizer, f"stages.{name}", policy.context, algorithm.compares, taught)
    diagnosis = diagnose(groups, situation)
    _print(diagnosis, groups, sampling, args.show)
    if args.json is not None:
        _write(args.json, diagnosis)
    return 0


def _check_alike(options: ReinforcementOptions, fmt: Format, policy: Policy, problems: list[Problem]) -> None:
    """Refuse ranks that have read something else than the first one."""
    from lemma.core.ranks import world_size

    if world_size() == 1:
        return
    from lemma.core.roll_call import check_alike
    from lemma.core.types import content_id
    from lemma.formats.encode import encode_prompt
    from lemma.models.model_options import ModelOptions
    from lemma.models.same_weights import check_same_weights
    from lemma.runs.ingredients import ingredients

    check_same_weights(policy.module)
    prompts = [encode_prompt(fmt, problem, policy.tokenizer).tolist() for problem in problems]
    marks = {"the problems": content_id([(p.id, p.golds) for p in problems]), "the prompts": content_id(prompts)}
    check_alike(marks | ingredients(options, ModelOptions(), None, fmt.model_dump(mode="json")))


def _chosen(
    args: argparse.Namespace, options: ReinforcementOptions, fmt: Format, policy: Policy, problems: list[Problem]
) -> tuple[list[Problem], Sampling]:
    """A few of the problems that the stage would keep, and what it samples with.

    Without a limit of its own, at most 1,024 tokens are generated here.
    """
    from dataclasses import replace

    from lemma.core.random import permutation
    from lemma.data.load_rows import filter_by_length
    from lemma.formats.encode import encode_prompt
    from lemma.stages.reinforcement.speaking import sampling_of

    lengths = [len(encode_prompt(fmt, problem, policy.tokenizer)) for problem in problems]
    pairs, limit = filter_by_length(list(zip(problems, lengths, strict=True)), lengths, options.data.prompt_length)
    longest = max(length for _, length in pairs) if limit is None else limit
    asked = args.max_tokens or options.rollout.max_tokens or min(ROOM, policy.context - longest)
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
    if args.temperature is not None:
        sampling = replace(sampling, temperature=args.temperature)
    order = permutation(len(kept), args.seed, "debug", "problems")[: args.groups]
    return [kept[place] for place in order], sampling


def _say(event: Event) -> None:
    if isinstance(event, Said):
        print(f"lemma: {event.text}", file=sys.stderr)


def _print(diagnosis: Checkup, groups: list[list[Episode]], sampling: Sampling, show: int) -> None:
    from lemma.planning.plan_words import many

    marks = {"fine": "ok  ", "note": "note", "problem": "BAD "}
    cuts = {"top_p": (sampling.top_p, 1.0), "top_k": (sampling.top_k, 0), "min_p": (sampling.min_p, 0.0)}
    cut = "".join(f", {name} {value:g}" for name, (value, off) in cuts.items() if value != off)
    print(
        f"{many(len(groups), 'problem')} x {many(len(groups[0]), 'sample')} "
        f"at temperature {sampling.temperature:g}{cut}, at most {sampling.max_tokens} tokens\n"
    )
    for finding in diagnosis.findings:
        print(f"  {marks[finding.level]} {finding.topic:<10} {finding.text}")
    if diagnosis.advice:
        print("\nWhat to change, the most urgent first:")
        for number, advice in enumerate(diagnosis.advice, start=1):
            print(f"  {number}. {advice}")
    else:
        print("\nNothing to change.")
    for sample in [sample for group in groups for sample in group][:show]:
        text = sample.text if len(sample.text) <= SHOWN else f"{sample.text[:SHOWN]} ..."
        told = f"{sample.finish}, {len(sample.ids)} tokens, reward {_worth(sample)}"
        print(f"\n--- {sample.problem_id}: {told}\n{text}")


def _worth(sample: Episode) -> str:
    """The reward of a sample, and where there are several, each of them before its weight."""
    shown = {name: "none" if value is None else f"{value:g}" for name, value in sample.rewards.items()}
    parts = f" ({', '.join(f'{name} {value}' for name, value in shown.items())})" if len(shown) > 1 else ""
    return ("none" if sample.reward is None else f"{sample.reward:g}") + parts


def _write(path: Path, diagnosis: Checkup) -> None:
    from dataclasses import asdict

    from lemma.core.files import write_whole

    content: dict[str, Any] = {
        "numbers": diagnosis.numbers,
        "findings": [asdict(finding) for finding in diagnosis.findings],
        "advice": diagnosis.advice,
    }
    write_whole(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
