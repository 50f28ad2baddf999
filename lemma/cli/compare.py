"""`lemma compare A B`: is one evaluation better than another, on the same problems?"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from lemma.cli.parser import Parser, named
from lemma.cli.run_comparison import are_runs, print_comparison
from lemma.core.errors import UserError

if TYPE_CHECKING:
    from lemma.evaluation.comparison import Change, Comparison, EvalResult
    from lemma.evaluation.eval_row import EvalRow

    Score = Callable[[EvalRow], float]

DESCRIPTION = """\
Compare two evaluations problem by problem: the difference with its 95% interval, the p-value of the exact sign-flip
test (McNemar's for one sample a problem), problems gained and lost, and the verdict in words. A and B are folders that
`lemma eval` wrote; numbers of samples may differ. Where both are runs: the options in which their recipes differ, where
their curves ended, and their evaluations of the same name."""
LONGEST = 1500
"""Characters of a text that are shown."""


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
    if are_runs(args.first, args.second):
        return print_comparison(args.first, args.second, args.json)
    from lemma.core.files import write_whole
    from lemma.evaluation.comparison import METRICS, compare, read_evaluation

    if args.show < 0:
        raise UserError(f"--show is {args.show}", fix="write 0 or more")
    wanted = named(args.benchmarks) if args.benchmarks else None
    first, second = (read_evaluation(path, args.metric) for path in (args.first, args.second))
    comparison = compare(first, second, wanted)
    print(f"A: {first.name}\nB: {second.name}\n")
    for row in [*comparison.rows, *([comparison.mean] if comparison.mean else [])]:
        print(_lines(row))
        for what, change in _ends(row, args.show):
            print(_shown(what, change, row.benchmark, first, second, METRICS[args.metric]))
    for doubt in comparison.doubts:
        print(f"lemma: warning: {doubt}", file=sys.stderr)
    if args.json is not None:
        rows = [{**asdict(row), "differs": row.differs, "words": row.words} for row in comparison.rows]
        mean = None if comparison.mean is None else {**asdict(comparison.mean), "words": comparison.mean.words}
        content = {"a": first.name, "b": second.name, "rows": rows, "mean": mean, "doubts": comparison.doubts}
        write_whole(args.json, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    return 0


def _lines(row: Comparison) -> str:
    test = row.test
    return (
        f"{row.benchmark}: {row.words}\n"
        f"    A {100 * test.first:.1f}%, B {100 * test.second:.1f}% on {test.problems:,} problems; "
        f"B gains {test.gained:,} and loses {test.lost:,}"
    )


def _ends(row: Comparison, count: int) -> list[tuple[str, Change]]:
    gained = [change for change in row.changes if change.second > change.first][:count]
    lost = [change for change in row.changes if change.second < change.first][::-1][:count]
    return [(what, change) for what, changes in (("gained", gained), ("lost", lost)) for change in changes]


def _shown(what: str, change: Change, benchmark: str, first: EvalResult, second: EvalResult, score: Score) -> str:
    """A problem on which the two differ: the question, the gold and an answer of each."""
    golds = " or ".join(first.golds[benchmark][change.problem])
    lines = [
        f"\n{what} {change.problem}: A {change.first:.0%}, B {change.second:.0%}; the answer is {golds}",
        *_indented("question", first.questions[benchmark][change.problem]),
    ]
    best, worst = (max, min) if change.first > change.second else (min, max)
    for name, evaluation, choose in (("A", first, best), ("B", second, worst)):
        rows = evaluation.samples[benchmark][change.problem]
        row = choose(rows, key=score)
        lines += _indented(f"{name}, {row.verdict}, read as {row.extracted}", row.completion)
    return "\n".join(lines)


def _indented(title: str, text: str) -> list[str]:
    """A title and a text below it; of a long text the beginning and the end."""
    text = text.strip()
    if len(text) > LONGEST:
        left_out = len(text) - LONGEST
        text = f"{text[: LONGEST // 3]}\n[... {left_out:,} characters ...]\n{text[-2 * LONGEST // 3 :]}"
    return [f"    {title}:", *(f"        {line}" for line in text.splitlines())]
