"""`lemma watch RUN`: the report of a run while it goes on, in a browser on this machine."""

from __future__ import annotations

import argparse
import webbrowser
from pathlib import Path

from lemma.cli.parser import Parser
from lemma.core.errors import UserError

DESCRIPTION = """\
Serve the page of `lemma report` from the run folder as it is now; it follows the run by itself. The server answers on
this machine only, and only to whoever has the address with its token. Nothing is written."""


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    parser = subparsers.add_parser("watch", help="look at a run while it goes on", description=DESCRIPTION)
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="the folder of a run")
    parser.add_argument("--port", metavar="N", type=int, default=0, help="port to answer on (default: any free one)")
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from lemma.cli.report import recipe_in_words
    from lemma.reports.live_page import Watch
    from lemma.reports.run_reader import open_runs

    if not 0 <= args.port < 65536:
        raise UserError(f"--port is {args.port}", fix="write a number below 65536")
    watch = Watch(open_runs(args.runs), [recipe_in_words(one) for one in args.runs], args.port).start()
    print(f"{watch.address}\nCtrl-C stops the page, not the run.", flush=True)
    if args.open:
        webbrowser.open(watch.address)
    try:
        watch.wait()
    except KeyboardInterrupt:
        print()
    finally:
        watch.close()
    return 0
