"""`lemma data check`: do training rows repeat problems of a benchmark?"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lemma.cli.parser import named
from lemma.core.errors import UserError

if TYPE_CHECKING:
    from lemma.data.data_options import DataOptions
    from lemma.data.readers import Item
    from lemma.evaluation.benchmarks import Loaded
    from lemma.evaluation.repeated import Contamination
    from lemma.evaluation.stage_data import Checked
    from lemma.recipe import Recipe

SHOWN = 160


def load_benchmarks(names: Sequence[str], data_dir: str | Path | None) -> list[Loaded]:
    from lemma.evaluation.benchmarks import find_benchmark, load_benchmark

    return [load_benchmark(find_benchmark(name), data_dir=data_dir, to_grade=False) for name in names]


def check_source(options: DataOptions, args: argparse.Namespace) -> int:
    """Compare one source with benchmarks, and write the rows that are left where asked to."""
    from lemma.data.load_rows import load_rows
    from lemma.data.prepared import item_rows, write_rows
    from lemma.data.readers import problem_of
    from lemma.evaluation.repeated import check_rows

    against = named(args.against or "")
    if not against:
        raise UserError("there is nothing to compare with", fix="name benchmarks, such as `--against math500,aime24`")
    items = load_rows(options, args.seed)
    problems = [problem_of(item) for item in items]
    contamination = check_rows(problems, load_benchmarks(against, args.data_dir))
    report(contamination, items, args.show)
    if args.clean is not None:
        kept = [item for place, item in enumerate(items) if place not in contamination.flagged]
        if not kept:
            raise UserError("every row repeats a problem of a benchmark", fix="choose other data")
        write_rows(args.clean, item_rows(kept))
        print(f"{args.clean}: {len(kept):,} rows, those that repeat nothing")
    return 0


def check_recipe(recipe: Recipe, args: argparse.Namespace) -> int:
    """Compare the data of every stage with the benchmarks named, or with those that the stage evaluates on."""
    if args.clean is not None:
        raise UserError("--clean writes the rows of one source", fix="name the data file in place of the recipe")
    stages = list(stages_with_benchmarks(recipe, named(args.against) if args.against else None, args.data_dir))
    if not stages:
        fix = "write `--against math500,aime24`, or `eval: {benchmarks: [...]}` in a stage"
        raise UserError("no stage names a benchmark", fix=fix)
    for stage in stages:
        print(f"stage {stage.name}")
        items, contamination = stage.check(recipe.run.seed)
        report(contamination, items, args.show)
    return 0


def stages_with_benchmarks(recipe: Recipe, against: Sequence[str] | None, data_dir: str | None) -> Iterator[Checked]:
    """The stages that have data and something to compare it with."""
    from lemma.evaluation.benchmarks import find_benchmark
    from lemma.evaluation.stage_data import Checked

    for name, stage in recipe.stages.items():
        data, measured = getattr(stage, "data", None), getattr(stage, "eval", None)
        names = against if against is not None else getattr(measured, "benchmarks", [])
        if data is not None and names:
            folder = data_dir or getattr(measured, "data_dir", None)
            yield Checked(name, data, [find_benchmark(one) for one in names], folder)


def plan_lines(recipe: Recipe, against: Sequence[str] | None, data_dir: str | None, *, is_asked: bool) -> Iterator[str]:
    """For each stage what its data repeat of its benchmarks, where that is cheap to know or was asked for."""
    for stage in stages_with_benchmarks(recipe, against, data_dir):
        names = ", ".join(benchmark.name for benchmark in stage.benchmarks)
        try:
            contamination = stage.check(recipe.run.seed)[1] if is_asked or stage.is_small else None
        except UserError:
            if is_asked:
                raise
            contamination = None
        if contamination is None:
            if stage.data.mix or stage.data.source != "arithmetic":
                yield f"\n{stage.name}: data not compared with {names}; --check-data does it"
        elif not contamination.flagged:
            yield f"\n{stage.name}: no row repeats a problem of {names}"
        else:
            rows = f"{len(contamination.flagged):,} of {contamination.rows:,} rows"
            yield f"\nWARNING: {stage.name}: {rows} repeat problems of its benchmarks"
            yield from (f"  {count.words}" for count in contamination.counts if count.repeated)
            yield "  `lemma data check SOURCE --against BENCHMARKS --clean FILE` writes the rows that repeat nothing"


def report(contamination: Contamination, items: Sequence[Item], show: int) -> None:
    from lemma.data.readers import problem_of

    for count in contamination.counts:
        print(f"  {count.words}")
    print(f"  {len(contamination.flagged):,} of {contamination.rows:,} rows repeat a problem")
    for repeat in sorted(contamination.repeats, key=lambda repeat: (repeat.kind != "exact", -repeat.share))[:show]:
        share = "the same" if repeat.kind == "exact" else f"{repeat.share:.0%} of its n-grams"
        row = problem_of(items[repeat.row])
        print(f"\n  row {repeat.row + 1} ({row.id}) and {repeat.benchmark} {repeat.problem.id}: {share}")
        for text in (row.question, repeat.problem.question):
            flat = " ".join(text.split())
            print(f"    {flat if len(flat) <= SHOWN else flat[:SHOWN] + ' ...'}")
