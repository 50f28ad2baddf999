"""`lemma train RECIPE`: run the stages of a recipe, or show what that would do."""

from __future__ import annotations

import argparse
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from lemma.cli.parser import Parser, add_recipe
from lemma.cli.watch import watched
from lemma.core.errors import UserError

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
    parser.add_argument("--fresh", action="store_true", help="throw away what the run folder holds and start over")
    parser.add_argument(
        "--extend",
        action="store_true",
        help="let a stage with more steps or epochs than before go on, though its learning rate was planned for fewer",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="check the recipe, write it out in full and show the plan; load nothing"
    )
    parser.add_argument("--watch", action="store_true", help="serve a page that shows the run live")
    parser.add_argument(
        "--ranks",
        metavar="N",
        type=int,
        help="processes that share the run; default: cluster.ranks, or one for each GPU of this machine",
    )
    parser.add_argument("--speakers", type=int, help=argparse.SUPPRESS)  # refused in words
    parser.add_argument(
        "--ray",
        action="store_true",
        help="place the ranks and vLLM servers on a Ray cluster (RAY_ADDRESS, or this host's)",
    )
    parser.set_defaults(run=run)
    parser.appendix = _options_help


def _options_help() -> str:
    from lemma.config.describe import as_help
    from lemma.recipe import Recipe

    return as_help(Recipe)


def run(args: argparse.Namespace) -> int:
    from lemma.cluster.rank_program import end_with_launcher, is_a_rank, ranks_here, train_on_ranks
    from lemma.recipe import load_recipe
    from lemma.runs.run_checks import check_split
    from lemma.runs.run_options import wanted_stages

    end_with_launcher()
    if args.speakers is not None:
        args.overrides = [*args.overrides, f"cluster.speakers={args.speakers}"]
    recipe = load_recipe(args.recipe, args.overrides)
    names = wanted_stages(recipe.stages, args.skip, args.only)
    if args.ranks is not None and args.ranks < 1 and not is_a_rank():
        raise UserError(f"--ranks {args.ranks} is not a number of processes", fix="write 1 or more")
    if args.dry_run:
        if (args.ranks or recipe.cluster.ranks) != 1:
            check_split(recipe.cluster, recipe.model, {name: recipe.stages[name] for name in names})
        return _dry_run(recipe, names, args)
    if not is_a_rank():
        with suppress(OSError):  # a run goes on where nobody reads its output
            print(f"{args.recipe}: {', '.join(names)}; the run is in {recipe.run.dir}", flush=True)
    if args.ray:
        from lemma.plugins.ray.ray_job_spec import job_spec_of
        from lemma.plugins.ray.ray_launch import launch_on_ray

        arguments = _arguments(args, str(Path(args.recipe).resolve()))
        return launch_on_ray(job_spec_of(recipe, arguments, args.ranks, fresh=args.fresh))
    beside = watched(recipe.run.dir) if args.watch and not is_a_rank() else nullcontext()
    with beside:
        count = 1 if is_a_rank() else ranks_here(recipe, args.ranks)
        if count == 1:
            return _train(recipe, names, args)
        return train_on_ranks(recipe, _arguments(args, args.recipe), count, fresh=args.fresh)


def _arguments(args: argparse.Namespace, recipe: str) -> list[str]:
    """The command for a rank; `--fresh` is for whoever starts it."""
    options = {"set": args.overrides, "skip": args.skip, "only": args.only}
    words = [f"--{name}={value}" for name, values in options.items() for value in values]
    return ["train", recipe, *words, *(["--extend"] if args.extend else [])]


def _train(recipe: Recipe, names: list[str], args: argparse.Namespace) -> int:
    """Run the stages in this process, alone or as one of the ranks that its environment names."""
    from lemma.cluster.rank_program import as_rank
    from lemma.core.events import Said
    from lemma.core.ranks import RankWorld, is_leader
    from lemma.planning.run_plan import preflight_warnings
    from lemma.reporting import sink_of
    from lemma.runs.run import train

    def work(world: RankWorld) -> int:
        with sink_of(recipe) as sink:
            for sentence in preflight_warnings(recipe, names) if is_leader() else ():
                sink(Said(sentence, "warning"))
            return train(recipe, skip=args.skip, only=args.only, fresh=args.fresh, extend=args.extend, sink=sink)

    settings = recipe.shared_settings()
    settings |= {f"--{name}": getattr(args, name) for name in ("skip", "only", "fresh", "extend")}
    return as_rank(work, recipe.cluster, recipe.run.device, settings, Path(recipe.run.dir))


def _dry_run(recipe: Recipe, names: list[str], args: argparse.Namespace) -> int:
    from lemma.cli.plan import end, show
    from lemma.core.files import write_whole
    from lemma.planning.run_plan import plan_run

    path = Path(recipe.run.dir) / "recipe.resolved.yaml"
    try:
        write_whole(path, recipe.to_yaml())
    except OSError as error:
        raise UserError(
            f"cannot write the resolved recipe: {error.strerror}", file=path, fix="name another folder as `run.dir`"
        ) from None
    plan = plan_run(recipe, names, skip=args.skip, only=args.only)
    show(plan)
    print(f"\nThe resolved recipe is in {path}. Nothing was loaded.")
    return end(plan)
