"""`lemma demo`: the built-in model learns the built-in arithmetic, by imitation and then by reward, and is measured."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from lemma.cli.parser import Parser, program

RECIPE = Path(__file__).with_name("demo.yaml")


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="train the built-in tiny model and show what it learnt",
        description="Train a model of half a million parameters from nothing on built-in word problems, on the CPU: "
        "SFT, then GRPO, and more SFT for comparison. Stop it and start it again: it resumes where it was, to the same "
        "numbers.",
    )
    parser.add_argument(
        "--set", metavar="A.B=C", action="append", default=[], dest="overrides", help="change a value of the recipe"
    )
    parser.add_argument("--fresh", action="store_true", help="start over")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from lemma.core.files import write_whole
    from lemma.planning.plan_words import describe
    from lemma.recipe import load_recipe
    from lemma.reporting import sink_of
    from lemma.reports import demo_summary
    from lemma.reports.report_file import write_report
    from lemma.reports.run_reader import open_runs
    from lemma.runs.run import train
    from lemma.stages.reinforcement.rl_options import ReinforcementOptions

    recipe = load_recipe(RECIPE, args.overrides)
    run_dir, seed, grpo = Path(recipe.run.dir), recipe.run.seed, recipe.stages["grpo"]
    assert isinstance(grpo, ReinforcementOptions)
    print(f"The recipe is {RECIPE.name}, the run folder {run_dir}. Ctrl-C stops; the same command resumes.\n")
    begin = time.perf_counter()
    with sink_of(recipe) as sink:
        code = train(recipe, fresh=args.fresh, sink=sink)
        if code or not (run_dir / "stages" / list(recipe.stages)[-1] / "done.json").is_file():
            return code
        scores = demo_summary.measure(run_dir, recipe.format, grpo, seed, sink)
    page = demo_summary.as_markdown(scores, seed)
    write_whole(run_dir / "results.md", page)
    print(f"\n{page}")
    print(f"This took {time.perf_counter() - begin:.0f} s. The page above is {run_dir / 'results.md'}.")
    print(f'Ask the model yourself:\n  {program()} generate {run_dir} "{demo_summary.question(scores)}"')
    to = run_dir / "report.html"
    write_report(open_runs([run_dir]), [describe(recipe)], to, megabytes=10)
    print(f"See what it did, in any browser:\n  {to}")
    return 0
