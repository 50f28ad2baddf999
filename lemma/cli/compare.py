"""`lemma compare A B`: is one evaluation better than another, on the same problems?"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from lemma.cli.parser import Parser, named, program, say
from lemma.core.errors import UserError

DESCRIPTION = """\
Compare two evaluations problem by problem: the difference with its 95% interval, the p-value of the exact sign-flip
test (McNemar's for one sample a problem), problems gained and lost, and the verdict in words. A and B are folders that
`lemma eval` wrote; numbers of samples may differ. Where both are runs: the options in which their recipes differ, where
their curves ended, and their evaluations of the same name."""


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    parser = subparsers.add_parser("compare", help="is one evaluation better than another", description=DESCRIPTION)
    parser.add_argument("first", metavar="A", type=Path, help="the folder of an evaluation, or of a run")
    parser.add_argument("second", metavar="B", type=Path, help="the folder of another one")
    parser.add_argument("--benchmarks", metavar="A,B", help="only these (default: all that both have)")
    parser.add_argument(
        "--metric", choices=["accuracy", "format", "finished"], default="accuracy", help="what to compare (accuracy)"
    )
    parser.add_argument(
        "--show", metavar="N", type=int, default=0, help="this many problems gained and lost, with both answers"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write everything to this file")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if _are_runs(args.first, args.second):
        return _compare_runs(args.first, args.second, args.json)
    from lemma.core.events import Said
    from lemma.core.files import write_whole
    from lemma.evaluation.comparison import METRICS, changes_of, compare, in_words, read_evaluation, shown_change

    if args.show < 0:
        raise UserError(f"--show is {args.show}", fix="write 0 or more")
    wanted = named(args.benchmarks) if args.benchmarks else None
    first, second = (read_evaluation(path, args.metric) for path in (args.first, args.second))
    comparison = compare(first, second, wanted)
    print(f"A: {first.name}\nB: {second.name}\n")
    for row in [*comparison.rows, *([comparison.mean] if comparison.mean else [])]:
        print(in_words(row))
        for what, change in changes_of(row, args.show):
            print(shown_change(what, change, row.benchmark, first, second, METRICS[args.metric]))
    for doubt in comparison.doubts:
        say(Said(f"warning: {doubt}"))
    if args.json is not None:
        rows = [{**asdict(row), "differs": row.differs, "words": row.words} for row in comparison.rows]
        mean = None if comparison.mean is None else {**asdict(comparison.mean), "words": comparison.mean.words}
        content = {"a": first.name, "b": second.name, "rows": rows, "mean": mean, "doubts": comparison.doubts}
        write_whole(args.json, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    return 0


def _are_runs(first: Path, second: Path) -> bool:
    """Whether both are folders of runs; a run against an evaluation is refused."""
    from lemma.reports.run_state import is_run

    which = [is_run(first), is_run(second)]
    if any(which) and not all(which):
        run, other = (first, second) if which[0] else (second, first)
        kept = run / "evaluations"
        where = f"those of the run are in {kept}" if kept.is_dir() else f"make one with `{program()} eval {run}`"
        raise UserError(f"{run} is a run and {other} is none", fix=f"compare two runs, or two evaluations: {where}")
    return all(which)


def _compare_runs(first: Path, second: Path, to: Path | None) -> int:
    from lemma.core.events import Said
    from lemma.core.files import write_whole
    from lemma.reports.compare_runs import compare_runs
    from lemma.reports.run_reader import open_runs

    comparison = compare_runs(*open_runs([first, second]))
    print(f"A: {first}\nB: {second}\n")
    print("\n".join(comparison.in_words()))
    for doubt in comparison.doubts:
        say(Said(f"warning: {doubt}"))
    print(f"\n`{program()} report {first} {second}` shows the curves over each other.")
    if to is not None:
        content = {"a": str(first), "b": str(second), **asdict(comparison)}
        write_whole(to, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    return 0
