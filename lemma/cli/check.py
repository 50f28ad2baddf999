"""`lemma data check`: do training rows repeat problems of a benchmark?"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lemma.core.errors import UserError

if TYPE_CHECKING:
    from lemma.data.options import DataOptions
    from lemma.data.readers import Item
    from lemma.evaluation.benchmarks import Loaded
    from lemma.evaluation.contamination import Contamination
    from lemma.recipe import Recipe

SHOWN = 160


def load_benchmarks(names: Sequence[str], data_dir: str | Path | None) -> list[Loaded]:
    from lemma.evaluation.benchmarks import find_benchmark, load_benchmark

    return [load_benchmark(find_benchmark(name), data_dir=data_dir) for name in names]


def check_source(options: DataOptions, args: argparse.Namespace) -> int:
    """Compare one source with benchmarks, and write the rows that are left where asked to."""
    from lemma.data.load import load_rows
    from lemma.data.prepare import item_rows, write_rows
    from lemma.data.readers import problem_of
    from lemma.evaluation.contamination import check_rows

    if not args.against:
        raise UserError("there is nothing to compare with", fix="name benchmarks, such as `--against math500,aime24`")
    items = load_rows(options, args.seed)
    problems = [problem_of(item) for item in items]
    found = check_rows(problems, load_benchmarks(args.against.split(","), args.data_dir))
    report(found, items, args.show)
    if args.clean is not None:
        kept = [item for place, item in enumerate(items) if place not in found.flagged]
        if not kept:
            raise UserError("every row repeats a problem of a benchmark", fix="choose other data")
        write_rows(args.clean, item_rows(kept))
        print(f"{args.clean}: {len(kept):,} rows, those that repeat nothing")
    return 0


def check_recipe(recipe: Recipe, args: argparse.Namespace) -> int:
    """Compare the data of every stage with the benchmarks named, or with those that the stage evaluates on."""
    from lemma.data.load import load_rows
    from lemma.data.readers import problem_of
    from lemma.evaluation.contamination import check_rows

    if args.clean is not None:
        raise UserError("--clean writes the rows of one source", fix="name the data file in place of the recipe")
    checked = False
    for name, stage in recipe.stages.items():
        data, measured = getattr(stage, "data", None), getattr(stage, "eval", None)
        against = args.against.split(",") if args.against else list(getattr(measured, "benchmarks", []))
        if data is None or not against:
            continue
        checked = True
        items = load_rows(data, recipe.run.seed)
        folder = args.data_dir or getattr(measured, "data_dir", None)
        print(f"stage {name}")
        report(check_rows([problem_of(item) for item in items], load_benchmarks(against, folder)), items, args.show)
    if not checked:
        fix = "write `--against math500,aime24`, or `eval: {benchmarks: [...]}` in a stage"
        raise UserError("no stage names a benchmark", fix=fix)
    return 0


def report(found: Contamination, items: Sequence[Item], show: int) -> None:
    from lemma.data.readers import problem_of

    for count in found.counts:
        print(f"  {count.words}")
    print(f"  {len(found.flagged):,} of {found.rows:,} rows repeat a problem")
    for repeat in sorted(found.repeats, key=lambda repeat: (repeat.kind != "exact", -repeat.share))[:show]:
        share = "the same" if repeat.kind == "exact" else f"{repeat.share:.0%} of its n-grams"
        row = problem_of(items[repeat.row])
        print(f"\n  row {repeat.row + 1} ({row.id}) and {repeat.benchmark} {repeat.problem.id}: {share}")
        for text in (row.question, repeat.problem.question):
            flat = " ".join(text.split())
            print(f"    {flat if len(flat) <= SHOWN else flat[:SHOWN] + ' ...'}")
