"""`lemma demo`: the built-in model learns the built-in arithmetic, and shows what it learnt."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from lemma.cli.parser import Parser

RECIPE = Path(__file__).with_name("demo.yaml")


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="train the built-in tiny model and show what it learnt",
        description="Train a model of half a million parameters from nothing on built-in word problems, on the CPU. "
        "Stop it and start it again: it goes on where it was, to the same weights.",
    )
    parser.add_argument(
        "--set", metavar="A.B=C", action="append", default=[], dest="overrides", help="change a value of the recipe"
    )
    parser.add_argument("--fresh", action="store_true", help="start anew")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from lemma.models.load import load_for_inference
    from lemma.recipe import load_recipe
    from lemma.reporting import make_sink
    from lemma.reporting.demo import answer, held_out_problems, summary
    from lemma.training.options import SupervisedOptions
    from lemma.training.run import train

    recipe = load_recipe(RECIPE, args.overrides)
    run_dir = Path(recipe.run.dir)
    print(f"The recipe is {RECIPE.name}, the run folder {run_dir}. Ctrl-C stops; the same command goes on.\n")
    begin = time.perf_counter()
    values = recipe.model_dump(mode="json")
    with make_sink(run_dir, tensorboard=recipe.run.tensorboard, wandb=recipe.run.wandb or None, recipe=values) as sink:
        code = train(recipe, fresh=args.fresh, sink=sink)
    last = list(recipe.stages)[-1]
    if code or not (run_dir / "stages" / last / "done.json").is_file():
        return code
    print(f"\nTrained in {time.perf_counter() - begin:.0f} s.")
    stage = recipe.stages[last]
    assert isinstance(stage, SupervisedOptions)
    model, tokenizer = load_for_inference(str(run_dir), "cpu")
    results = answer(model, tokenizer, recipe.format, held_out_problems(stage.data.arithmetic))
    print(summary(results))
    print(f'Ask it yourself:\n  lemma generate {run_dir} "{results[0].problem.question}"')
    return 0
