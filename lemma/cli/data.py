"""`lemma data show`, `prepare` and `check`: look at data as the model will, write it, compare it with benchmarks."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lemma.cli.parser import Parser, add_overrides, named
from lemma.core.errors import UserError

if TYPE_CHECKING:
    from lemma.data.data_options import DataOptions
    from lemma.data.readers import Item

SHOW = """\
Print rows of a source; of a mix, the share of each source and rows of each. SOURCE may be a recipe (.yaml): the data of
each of its stages. Without SOURCE, a mix is given with --set 'mix=[{source: gsm8k, count: 100}, ...]'. With --format
rows are shown as the model will see them: the prompt, then what is learnt between [[ and ]], decoded from the
tokens."""
PREPARE = """\
Write data files. The ending of the name decides the kind: .parquet, .jsonl, .jsonl.gz, .json, .csv."""
LUFFY = """\
Write LUFFY's three files: openr1.parquet (problems with a teacher's trace), openrlhf_sft/train.jsonl (the same for
supervised learning) and openr1.complement.parquet (other problems, for SFT followed by RL). Without a source, its own
datasets are taken from the hub."""

CHECK = """\
Find rows that repeat problems of benchmarks, word for word or in most of their words, and how many problems of each
benchmark are affected. SOURCE may be a recipe (.yaml): its stages' data against the benchmarks they evaluate on."""


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    parser = subparsers.add_parser("data", help="look at data and prepare it", description="Look at data, prepare it.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="what", required=True)
    show = commands.add_parser("show", help="print rows", description=SHOW)
    _add_source(show, default="those of a mix")
    show.add_argument(
        "--format", metavar="NAME", help="show rows in this format, such as r1_zero or {name: r1_zero, system: Think.}"
    )
    show.add_argument("--model", metavar="PATH", default="tiny", help="whose tokenizer to use (default: tiny)")
    show.add_argument("-n", "--limit", dest="n", metavar="N", type=int, default=3, help="how many rows (default: 3)")
    show.set_defaults(run=run_show)
    prepare = commands.add_parser("prepare", help="write data files", description=PREPARE)
    kinds = prepare.add_subparsers(title="what to write", metavar="KIND", dest="kind", required=True)
    rows = kinds.add_parser("rows", help="all rows of a source, in Lemma's own columns", description=PREPARE)
    _add_source(rows)
    rows.add_argument("--to", metavar="FILE", type=Path, required=True, help="the file to write")
    rows.set_defaults(run=run_rows)
    correct = kinds.add_parser("correct", help="only rows whose response gives the right answer", description=PREPARE)
    _add_source(correct)
    correct.add_argument("--to", metavar="FILE", type=Path, required=True, help="the file to write")
    correct.add_argument("--format", metavar="NAME", help="only rows that also keep this format, such as r1_zero")
    correct.set_defaults(run=run_correct)
    luffy = kinds.add_parser("luffy", help="LUFFY's three files", description=LUFFY)
    _add_source(luffy, default="openr1_math")
    luffy.add_argument("--to", metavar="DIR", type=Path, default=Path("data"), help="the folder (default: data)")
    luffy.add_argument("--complement", metavar="SOURCE", help="where the problems of the third file come from")
    luffy.add_argument(
        "--hold-out", metavar="SHARE", type=float, default=0.5, help="or a share of the source (default: 0.5)"
    )
    luffy.set_defaults(run=run_luffy)
    check = commands.add_parser("check", help="find rows that repeat benchmark problems", description=CHECK)
    _add_source(check)
    check.add_argument("--against", metavar="A,B", help="benchmarks: names, data files, hub datasets")
    check.add_argument("--data-dir", metavar="DIR", help="folder with the benchmarks' files in place of the hub")
    check.add_argument("--show", metavar="N", type=int, default=3, help="how many pairs to print (default: 3)")
    check.add_argument("--clean", metavar="FILE", type=Path, help="write the rows that repeat nothing")
    check.set_defaults(run=run_check)


def _add_source(parser: Parser, default: str | None = None) -> None:
    parser.add_argument(
        "source",
        metavar="SOURCE",
        nargs="?" if default else None,
        help="a file, a folder, a hub dataset, or arithmetic" + (f" (default: {default})" if default else ""),
    )
    parser.add_argument("--reader", metavar="NAME", help="how rows are read (default: by their columns)")
    parser.add_argument("--split", metavar="NAME", help="split of a hub dataset, a folder or arithmetic")
    parser.add_argument("--config", metavar="NAME", help="configuration of a hub dataset")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="for what is drawn at random (default: 0)")
    add_overrides(
        parser, "any option of the data of a recipe, such as count=100 or arithmetic.operations=4; may be repeated"
    )


def _options(args: argparse.Namespace, source: str | None = None) -> DataOptions:
    from pydantic import ValidationError

    from lemma.config.document import Document, Place
    from lemma.config.explain import explain
    from lemma.config.load import apply
    from lemma.data.data_options import DataOptions

    given = {name: getattr(args, name) for name in ("reader", "split", "config") if getattr(args, name) is not None}
    document = Document("", {"source": source or args.source, **given}, {(): Place("command line")})
    apply(document, args.overrides, DataOptions)
    try:
        return DataOptions.model_validate(document.data)
    except ValidationError as error:
        raise explain(error, DataOptions, document) from None


def run_check(args: argparse.Namespace) -> int:
    from lemma.evaluation.stage_data import check_source, found_in_words, stages_with_benchmarks, write_clean

    if args.show < 0:
        raise UserError(f"--show {args.show} is below 0", fix="write 0 or more")
    against = named(args.against or "")
    if args.source.endswith((".yaml", ".yml")):
        from lemma.recipe import load_recipe

        recipe = load_recipe(args.source, args.overrides)
        if args.clean is not None:
            raise UserError("--clean writes the rows of one source", fix="name the data file in place of the recipe")
        stages = list(stages_with_benchmarks(recipe, against if args.against else None, args.data_dir))
        if not stages:
            fix = "write `--against math500,aime24`, or `eval: {benchmarks: [...]}` in a stage"
            raise UserError("no stage names a benchmark", fix=fix)
        for stage in stages:
            print(f"stage {stage.name}")
            print("\n".join(found_in_words(*stage.check(recipe.run.seed), args.show)))
        return 0
    options = _options(args)
    if not against:
        raise UserError("there is nothing to compare with", fix="name benchmarks, such as `--against math500,aime24`")
    items, contamination = check_source(options, against, args.data_dir, args.seed)
    print("\n".join(found_in_words(items, contamination, args.show)))
    if args.clean is not None:
        count = write_clean(args.clean, items, contamination)
        print(f"{args.clean}: {count:,} rows, those that repeat nothing")
    return 0


def run_rows(args: argparse.Namespace) -> int:
    from lemma.data.load_rows import load_rows
    from lemma.data.prepared import item_rows, write_rows

    items = load_rows(_options(args), args.seed)
    write_rows(args.to, item_rows(items))
    print(f"{args.to}: {len(items):,} rows")
    return 0


def run_correct(args: argparse.Namespace) -> int:
    from lemma.api.prepare_call import right_demonstrations
    from lemma.data.prepared import item_rows, write_rows

    kept, all_rows = right_demonstrations(_options(args), args.seed, args.format)
    write_rows(args.to, item_rows(kept))
    print(f"{args.to}: {len(kept):,} of {all_rows:,} rows, those whose response gives the right answer")
    return 0


def run_luffy(args: argparse.Namespace) -> int:
    from lemma.api.prepare_call import luffy_files

    source = args.source or "openr1_math"
    complement = args.complement or (None if args.source else "openr1_math_complement")
    others = _options(args, complement) if complement is not None else args.hold_out
    for path, count in luffy_files(args.to, _options(args, source), others, args.seed, args.split or "train"):
        print(f"{path}: {count:,} rows")
    return 0


def run_show(args: argparse.Namespace) -> int:
    if args.n < 1:
        raise UserError(f"-n {args.n} shows nothing", fix="write a number from 1")
    from lemma.reports.shown_rows import as_written, in_format

    view = as_written if args.format is None else in_format(args.format, args.model)
    if args.source is None or not args.source.endswith((".yaml", ".yml")):
        options = _options(args, args.source or "arithmetic")
        if args.source is None and not options.mix:
            raise UserError("there is nothing to show", fix="name a source or a recipe, or give --set mix=[...]")
        _show(options, args, view)
        return 0
    from lemma.data.data_options import journal_place
    from lemma.recipe import load_recipe

    for name, stage in load_recipe(args.source, args.overrides).stages.items():
        data = getattr(stage, "data", None)
        if data is None or data.source == "environment" or journal_place(data.source) is not None:
            print(f"=== stage {name}: its rows are made while it runs\n")
            continue
        print(f"=== stage {name}\n")
        _show(data, args, view)
    return 0


def _show(options: DataOptions, args: argparse.Namespace, view: Callable[[Item], str]) -> None:
    """Rows of the only source; of a mix, the share of each source before rows of each."""
    from lemma.data.load_rows import first_items, load_rows, rows_by_source

    if options.mix:
        parts = rows_by_source(options, args.seed)
        whole = sum(len(items) for _, items in parts)
        for place, (source, items) in enumerate(parts, start=1):
            share = f"{len(items):,} of {whole:,} rows ({len(items) / max(1, whole):.1%})"
            print(f"--- source {place} of {len(parts)}: {source.source}, {share}\n")
            _print_rows(items[: args.n], args, view)
        return
    if options.source == "arithmetic":
        options = options.model_copy(update={"count": args.n, "fraction": None})
    is_whole = options.source == "arithmetic" or options.count is not None or options.fraction
    items = load_rows(options, args.seed) if is_whole else first_items(options, args.n, args.seed)
    _print_rows(items[: args.n], args, view)


def _print_rows(items: Sequence[Item], args: argparse.Namespace, view: Callable[[Item], str]) -> None:
    from lemma.data.choices import as_asked
    from lemma.reports.shown_rows import headed

    for number, item in enumerate(items if args.format is None else map(as_asked, items), start=1):
        print(f"{headed(item, number, view)}\n")
