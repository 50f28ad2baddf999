"""`lemma report RUN [RUN ...]`: a run as one page that opens in any browser."""

from __future__ import annotations

import argparse
from pathlib import Path

from lemma.cli.parser import Parser
from lemma.core.errors import UserError

DESCRIPTION = """\
Write one HTML file about a run, or about several over each other: the recipe in words, curves, where the time went,
evaluations with intervals, and completions to browse and search. The file needs neither a network nor a server."""


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    parser = subparsers.add_parser("report", help="a run as one page", description=DESCRIPTION)
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="the folder of a run")
    parser.add_argument("--to", metavar="FILE", type=Path, help="the file to write (default: report.html in the run)")
    parser.add_argument(
        "--size", metavar="MB", type=float, default=10.0, help="largest size of the file; samples fill it (10)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from lemma.planning.plan_words import run_in_words
    from lemma.reports.report_file import write_report
    from lemma.reports.run_reader import open_runs

    if not 0 < args.size <= 500:
        raise UserError(f"--size is {args.size:g}", fix="write a number of megabytes up to 500")
    runs = open_runs(args.runs)
    words = [run_in_words(one) for one in args.runs]
    to = args.to or args.runs[0] / "report.html"
    written = write_report(runs, words, to, args.size)
    samples = f", with the samples of {written.chunks} of {written.chunks_there} steps and evaluations"
    print(f"wrote {to} ({written.size / 1e6:.1f} MB{samples if written.chunks_there else ''})")
    return 0
