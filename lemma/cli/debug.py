"""`lemma debug MODEL --recipe R`: what a model generates under a recipe's sampling settings, and what to change."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lemma.cli.parser import Parser, add_device, add_overrides, add_ranks, say
from lemma.core.errors import UserError
from lemma.core.events import silent

if TYPE_CHECKING:
    from lemma.engines.protocol import Sampling
    from lemma.evaluation.diagnose import Checkup
    from lemma.formats import Format
    from lemma.recipe import Recipe
    from lemma.rollouts import Episode
    from lemma.stages.reinforcement.rl_options import ReinforcementOptions

DESCRIPTION = """\
Generate a few groups as the reinforcement stage of a recipe would, and say in words what is good and what is not:
diversity, format, truncation, how completions end, rewards, entropy, tokenisation, and what to change. A recipe without
such a stage is tried with that stage's defaults on the data of its last stage. MODEL is a run, a model folder, an
adapter folder, a GGUF file or a hub name; a run brings its own recipe."""
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
    from lemma.api.checkup_call import stage_to_try
    from lemma.cluster.rank_program import on_ranks
    from lemma.runs.run_options import taught_in

    recipe = _recipe(args)
    name, options = stage_to_try(recipe, args.stage)
    settings = recipe.shared_settings()
    work = partial(_debug, args, recipe.format, name, options, taught_in(recipe.stages, name))
    return on_ranks(work, args.arguments, args.ranks, args.device, is_shared=False, settings=settings)


def _recipe(args: argparse.Namespace) -> Recipe:
    from lemma.recipe import load_recipe

    own = Path(args.model).expanduser() / "recipe.yaml"
    if args.recipe is None and not own.is_file():
        raise UserError("there is no recipe", fix="name one with --recipe, or give a run folder as MODEL")
    return load_recipe(args.recipe if args.recipe is not None else own, args.overrides)


def _debug(args: argparse.Namespace, fmt: Format, name: str, options: ReinforcementOptions, taught: str | None) -> int:
    from lemma.api.checkup_call import checkup
    from lemma.core.files import write_whole
    from lemma.core.ranks import is_leader

    found = checkup(
        args.model, fmt, name, options, taught,
        groups=args.groups, group_size=args.group_size, temperature=args.temperature, max_tokens=args.max_tokens,
        seed=args.seed, device=args.device, sink=say if is_leader() else silent,
    )  # fmt: skip
    if not is_leader():
        return 0
    _print(*found, args.show)
    diagnosis = found[0]
    if args.json is not None:
        content = {
            "numbers": diagnosis.numbers,
            "findings": list(map(asdict, diagnosis.findings)),
            "advice": diagnosis.advice,
        }
        write_whole(args.json, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    return 0


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
