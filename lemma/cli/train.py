"""`lemma train RECIPE`: run the stages of a recipe, or show what that would do."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from lemma.cli.parser import Parser, add_recipe
from lemma.cli.watch import watched
from lemma.core.errors import UserError, nearest

if TYPE_CHECKING:
    from lemma.recipe import Recipe

DESCRIPTION = """\
Run the stages of a recipe, in order. The same command given again goes on where the run stopped."""


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    parser = subparsers.add_parser("train", help="run the stages of a recipe", description=DESCRIPTION)
    add_recipe(parser)
    parser.add_argument(
        "--skip",
        metavar="STAGE",
        action="append",
        default=[],
        help="leave a stage out; the next one starts from what it left behind earlier; may be repeated",
    )
    parser.add_argument(
        "--only", metavar="STAGE", action="append", default=[], help="leave all other stages out; may be repeated"
    )
    parser.add_argument("--fresh", action="store_true", help="throw away what the run folder holds and start anew")
    parser.add_argument(
        "--extend",
        action="store_true",
        help="let a stage with more steps or epochs than before go on, though its learning rate was planned for fewer",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="check the recipe, write it out in full and show the plan; load nothing"
    )
    parser.add_argument("--watch", action="store_true", help="serve a page that shows the run while it goes on")
    parser.set_defaults(run=run)
    parser.appendix = _options_help


def _options_help() -> str:
    from lemma.config.describe import as_help
    from lemma.recipe import Recipe

    return as_help(Recipe)


def run(args: argparse.Namespace) -> int:
    from lemma.recipe import load_recipe

    recipe = load_recipe(args.recipe, args.overrides)
    _check_stages(recipe, args.skip, args.only)
    if args.dry_run:
        return _dry_run(recipe, args.skip, args.only)
    from lemma.cluster.foreign_configs import foreign_sentences
    from lemma.core.events import Said
    from lemma.reporting import sink_of
    from lemma.runs.run import train

    beside = watched(recipe.run.dir) if args.watch else nullcontext()
    with beside, sink_of(recipe) as sink:
        for sentence in foreign_sentences(recipe):
            sink(Said(sentence, "warning"))
        return train(recipe, skip=args.skip, only=args.only, fresh=args.fresh, extend=args.extend, sink=sink)


def _check_stages(recipe: Recipe, skip: list[str], only: list[str]) -> None:
    for option, names in (("--skip", skip), ("--only", only)):
        for name in names:
            if name not in recipe.stages:
                raise UserError(f"{option} {name}: the recipe has no such stage", fix=nearest(name, recipe.stages))
    if skip and only:
        raise UserError("--skip and --only exclude each other", fix="give one of the two")
    if set(skip) == set(recipe.stages):
        raise UserError("--skip leaves no stage to run", fix="skip fewer of them")


def _dry_run(recipe: Recipe, skip: list[str], only: list[str]) -> int:
    from lemma.cli.plan import print_plan
    from lemma.core.files import write_whole

    path = Path(recipe.run.dir) / "recipe.resolved.yaml"
    try:
        write_whole(path, recipe.to_yaml())
    except OSError as error:
        raise UserError(
            f"cannot write the resolved recipe: {error.strerror}", file=path, fix="name another folder as `run.dir`"
        ) from None
    names = [name for name in recipe.stages if name not in skip and (not only or name in only)]
    print_plan(recipe, names, skip=skip, only=only)
    print(f"\nThe resolved recipe is in {path}. Nothing was loaded.")
    return 0
