"""`lemma export RUN`: a model in the Hugging Face format from any checkpoint of a run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lemma.cli.parser import Parser, named
from lemma.core.errors import UserError

if TYPE_CHECKING:
    from lemma.recipe import Recipe


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
    parser.add_argument(
        "--onto",
        choices=["base"],
        help="base: one adapter for the recipe's model, the adapters of all stages joined; its error is printed",
    )
    parser.add_argument("--rank", metavar="N", type=int, help="rank of that adapter (default: nothing is cut off)")
    parser.add_argument(
        "--to",
        metavar=("DIR", "NAME"),
        nargs="+",
        help="folder to write (default: RUN/export/...), or `hub NAME`: also push it to the hub, as a private model",
    )
    parser.add_argument("--public", action="store_true", help="let everybody see what is pushed to the hub")
    parser.add_argument(
        "--dtype", choices=["fp32", "bf16", "fp16"], help="precision of the weights (default: that of the run)"
    )
    parser.add_argument("--gguf", action="store_true", help="also write the model as a GGUF file, for llama.cpp")
    parser.add_argument(
        "--contamination",
        metavar="BENCHMARKS",
        nargs="?",
        const="",
        help="compare the training data with these benchmarks (default: those of the recipe), for the card",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    run_dir = Path(args.run_dir)
    if not (run_dir / "recipe.yaml").is_file():
        raise UserError(
            f"{run_dir} is not the folder of a run", fix="give the folder that `run.dir` of the recipe names"
        )
    from lemma.plugins.gguf.gguf_writing import gguf_package, write_gguf
    from lemma.recipe import load_recipe
    from lemma.runs.exporting import export_model
    from lemma.runs.publishing_model import finish_export, push

    if args.rank is not None and (args.onto is None or args.rank < 1):
        raise UserError("--rank is the rank of an adapter, at least 1", fix="write `--onto base --rank 16`")
    folder, name = _target(args)
    if args.gguf:
        gguf_package()
    recipe = load_recipe(run_dir / "recipe.yaml")
    contamination = _contamination(recipe, args)
    done = export_model(
        recipe,
        run_dir,
        stage=args.stage,
        checkpoint=args.checkpoint,
        kind="adapter" if args.adapter or args.onto else "merged",
        to=folder,
        onto_base=args.onto == "base",
        rank=args.rank,
    )
    finish_export(done.folder, recipe, run_dir, done.stage, done.step, args.dtype, contamination)
    print(f"wrote {done.folder}")
    if args.gguf:
        print(f"wrote {write_gguf(done.folder)}")
    if name is not None:
        print(f"pushed to {push(done.folder, name, public=args.public)}")
    if done.base is not None:
        print(f"it belongs on {done.base}")
    if done.joined is not None:
        print(f"rank {done.joined.rank}; {done.joined.error:.2g} of the size of all updates was lost")
    return 0


def _contamination(recipe: Recipe, args: argparse.Namespace) -> dict[str, Any] | None:
    """What the training data repeat of benchmarks, where that was asked for; it is told before anything is written."""
    if args.contamination is None:
        return None
    from lemma.runs.card_contamination import check_stages, in_words
    from lemma.runs.exporting import newest_stage
    from lemma.runs.model_card import stages_until

    values = recipe.model_dump(mode="json")
    stage = args.stage or newest_stage(recipe, Path(args.run_dir))
    if stage not in recipe.stages:
        return None  # the export says so
    stages = stages_until(values, stage)
    against = named(args.contamination) or None
    record = check_stages(stages, recipe.run.seed, against=against, is_asked=True)
    if not record["benchmarks"]:
        raise UserError("the recipe names no benchmark", fix="name some, such as `--contamination math500,aime24`")
    print(in_words(record))
    return record


def _target(args: argparse.Namespace) -> tuple[Path | None, str | None]:
    """The folder and the name on the hub that `--to` gives."""
    words: list[str] = args.to or []
    if args.gguf and (args.adapter or args.onto):
        raise UserError("an adapter has no GGUF file", fix="leave --adapter or --gguf out")
    if words[:1] == ["hub"] and len(words) == 2:
        return None, words[1]
    if len(words) > 1 or words == ["hub"]:
        raise UserError(f"--to {' '.join(words)} is neither a folder nor `hub NAME`", fix="write --to hub user/model")
    if args.public:
        raise UserError("--public applies only to the hub", fix="write --to hub user/model --public")
    return (Path(words[0]) if words else None), None
