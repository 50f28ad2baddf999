"""`lemma export RUN`: a model in the Hugging Face format from any checkpoint of a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from lemma.cli.parser import Parser
from lemma.core.errors import UserError


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    parser = subparsers.add_parser(
        "export",
        help="make a model from a checkpoint",
        description="Write a checkpoint of a run as a model that plain transformers (or peft) loads.",
    )
    parser.add_argument("run_dir", metavar="RUN", help="the folder of a run")
    parser.add_argument("--stage", metavar="NAME", help="which stage (default: the newest with a checkpoint)")
    parser.add_argument("--checkpoint", metavar="WHICH", default="last", help="last, best or a step (default: last)")
    parser.add_argument("--adapter", action="store_true", help="the adapter alone instead of the merged model")
    parser.add_argument("--to", metavar="DIR", type=Path, help="folder to write (default: RUN/export/...)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    run_dir = Path(args.run_dir)
    if not (run_dir / "recipe.yaml").is_file():
        raise UserError(
            f"{run_dir} is not the folder of a run", fix="give the folder that `run.dir` of the recipe names"
        )
    from lemma.recipe import load_recipe
    from lemma.runs.exporting import export_model

    recipe = load_recipe(run_dir / "recipe.yaml")
    target = export_model(
        recipe,
        run_dir,
        stage=args.stage,
        checkpoint=args.checkpoint,
        kind="adapter" if args.adapter else "merged",
        to=args.to,
    )
    print(f"wrote {target}")
    return 0
