"""`lemma compare RUN_A RUN_B`: what `lemma compare` prints about two runs."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from textwrap import shorten

from lemma.cli.parser import program
from lemma.core.errors import UserError

# Characters of an option's value that are printed.
LONGEST = 80


def are_runs(first: Path, second: Path) -> bool:
    """Whether both are folders of runs; a run against an evaluation is refused."""
    from lemma.reports.run_state import is_run

    which = [is_run(first), is_run(second)]
    if any(which) and not all(which):
        run, other = (first, second) if which[0] else (second, first)
        kept = run / "evaluations"
        where = f"those of the run are in {kept}" if kept.is_dir() else f"make one with `{program()} eval {run}`"
        raise UserError(f"{run} is a run and {other} is none", fix=f"compare two runs, or two evaluations: {where}")
    return all(which)


def print_comparison(first: Path, second: Path, to: Path | None) -> int:
    from lemma.core.files import write_whole
    from lemma.reporting.console import number
    from lemma.reports.compare_runs import compare_runs
    from lemma.reports.run_reader import open_runs

    comparison = compare_runs(*open_runs([first, second]))
    print(f"A: {first}\nB: {second}\n\nOptions that differ:")
    for one in comparison.options:
        first_value, second_value = (shorten(value, LONGEST, placeholder=" ...") for value in one["values"])
        print(f"  {one['key']}: {first_value} in A, {second_value} in B")
    if not comparison.options:
        print("  none")
    stage = ""
    for end in comparison.curves:
        if end.stage != stage:
            stage = end.stage
            print(f"\nStage {stage}, mean of the last tenth of {end.last_step} steps:")
        print(f"  {end.name:<18} A {number(end.first):>9}   B {number(end.second):>9}")
    if comparison.evaluations:
        print("\nEvaluations, problem by problem:")
    for row in comparison.evaluations:
        print(f"  {row['benchmark']} ({row['b']} against {row['a']}): {row['words']}")
        print(f"    A {100 * row['first']:.1f}%, B {100 * row['second']:.1f}% on {row['problems']:,} problems; "
              f"B gains {row['gained']:,} and loses {row['lost']:,}")  # fmt: skip
    for doubt in comparison.doubts:
        print(f"lemma: warning: {doubt}", file=sys.stderr)
    print(f"\n`{program()} report {first} {second}` shows the curves over each other.")
    if to is not None:
        content = {"a": str(first), "b": str(second), **asdict(comparison)}
        write_whole(to, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    return 0
