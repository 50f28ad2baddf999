"""`lemma plan RECIPE`: what a recipe would do, stage by stage."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from lemma.cli.parser import Parser, add_recipe, named

if TYPE_CHECKING:
    from lemma.planning.run_plan import RunPlan

DESCRIPTION = """\
Show what a recipe would do. Nothing is written and no model is loaded; of a hub model the configuration is fetched.
Where a stage's data and the benchmarks it evaluates on are small files on this machine, rows that repeat a benchmark
problem are counted. The exit code is 1 if something that the run needs is missing, or does not fit into memory."""


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    parser = subparsers.add_parser("plan", help="what a recipe would do", description=DESCRIPTION)
    add_recipe(parser)
    parser.add_argument("--check-data", action="store_true", help="compare with benchmarks whatever has to be read")
    parser.add_argument("--against", metavar="A,B", help="benchmarks to compare with, in place of those of the stages")
    parser.add_argument("--data-dir", metavar="DIR", help="folder with the benchmarks' files in place of the hub")
    parser.add_argument("--ranks", metavar="N", type=int, help="plan for so many GPUs, one rank each")
    parser.add_argument("--gpu", metavar="NAME", help="which GPUs: a100-80, h200-141, ... (default h100-80)")
    parser.add_argument("--length", metavar="TOKENS", type=int, help="tokens of a sequence, where no file tells them")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from lemma.evaluation.benchmarks import find_benchmark
    from lemma.evaluation.stage_data import repeats_in_words
    from lemma.planning.prompt_words import prompt_trouble
    from lemma.planning.rank_table import NOTHING_FITS, rank_lines
    from lemma.planning.run_plan import plan_run
    from lemma.recipe import load_recipe

    recipe = load_recipe(args.recipe, args.overrides)
    against = [name for name in named(args.against) if find_benchmark(name)] if args.against else None
    tables = rank_lines(recipe, args.ranks, args.gpu, args.length)  # a wrong name of a GPU ends it here
    plan = plan_run(recipe, list(recipe.stages), is_for_here=not tables)
    show(plan)
    print("".join(f"{line}\n" for line in tables), end="")
    trouble = prompt_trouble(recipe)
    if trouble is not None:
        print(f"\nwarning: {trouble}")
    plan.is_too_large |= any(NOTHING_FITS in line for line in tables)
    plan.is_missing |= trouble is not None
    for line in repeats_in_words(recipe, against, args.data_dir, is_asked=args.check_data or against is not None):
        print(line)
    return end(plan)


def show(plan: RunPlan) -> None:
    print(plan.text)
    for sentence in plan.warnings:
        print(f"\nwarning: {sentence}")


def end(plan: RunPlan) -> int:
    """The last word on a plan, and the exit code."""
    print(f"\n{plan.trouble}\n" if plan.trouble else "", end="")
    return 1 if plan.trouble else 0
