"""`lemma compare A B`: is one evaluation better than another, on the same problems?"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from lemma.cli.parser import Parser, named
from lemma.core.errors import UserError

if TYPE_CHECKING:
    from lemma.evaluation.comparison import Comparison

DESCRIPTION = """\
Compare two evaluations problem by problem: the difference with its 95% interval, the p-value of the exact sign-flip
test (McNemar's for one sample a problem), problems gained and lost, and the verdict in words. A and B are folders that
`lemma eval` wrote; numbers of samples may differ."""


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    parser = subparsers.add_parser("compare", help="is one evaluation better than another", description=DESCRIPTION)
    parser.add_argument("first", metavar="A", type=Path, help="the folder of an evaluation")
    parser.add_argument("second", metavar="B", type=Path, help="the folder of another one")
    parser.add_argument("--benchmarks", metavar="A,B", help="only these (default: all that both have)")
    parser.add_argument(
        "--metric", choices=["accuracy", "format", "finished"], default="accuracy", help="what to compare (accuracy)"
    )
    parser.add_argument("--show", metavar="N", type=int, default=0, help="list this many problems gained and lost")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write everything to this file")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from lemma.core.files import write_whole
    from lemma.evaluation.comparison import compare, read_evaluation

    if args.show < 0:
        raise UserError(f"--show is {args.show}", fix="write 0 or more")
    wanted = named(args.benchmarks) if args.benchmarks else None
    first, second = (read_evaluation(path, args.metric) for path in (args.first, args.second))
    found = compare(first, second, wanted)
    print(f"A: {first.name}\nB: {second.name}\n")
    for row in [*found.rows, *([found.mean] if found.mean else [])]:
        print(_lines(row))
        for change in _ends(row, args.show):
            print(f"    {change}")
    for doubt in found.doubts:
        print(f"lemma: warning: {doubt}", file=sys.stderr)
    if args.json is not None:
        rows = [{**asdict(row), "differs": row.differs, "words": row.words} for row in found.rows]
        mean = None if found.mean is None else {**asdict(found.mean), "words": found.mean.words}
        content = {"a": first.name, "b": second.name, "rows": rows, "mean": mean, "doubts": found.doubts}
        write_whole(args.json, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    return 0


def _lines(row: Comparison) -> str:
    test = row.test
    return (
        f"{row.benchmark}: {row.words}\n"
        f"    A {100 * test.first:.1f}%, B {100 * test.second:.1f}% on {test.problems:,} problems; "
        f"B gains {test.gained:,} and loses {test.lost:,}"
    )


def _ends(row: Comparison, count: int) -> list[str]:
    gained = [change for change in row.changes if change.second > change.first][:count]
    lost = [change for change in row.changes if change.second < change.first][::-1][:count]
    return [f"{what} {c.problem}: {c.first:.0%} -> {c.second:.0%}"
            for what, changes in (("gained", gained), ("lost  ", lost)) for c in changes]  # fmt: skip
