"""`lemma watch RUN`: the report of a run in progress, in a browser on this machine."""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lemma.cli.parser import Parser
from lemma.core.errors import UserError

DESCRIPTION = """\
Serve the page of `lemma report` from the run folder as it is now; it follows the run by itself. The server answers on
this machine only, and only to whoever has the address with its token. Nothing is written."""

# Seconds that the page of a training process stays after that process was killed, to show the run as dead.
LINGER = 60.0


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    parser = subparsers.add_parser("watch", help="watch a run live", description=DESCRIPTION)
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="the folder of a run")
    parser.add_argument("--port", metavar="N", type=int, default=0, help="port to answer on (default: any free one)")
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    parser.add_argument("--beside", action="store_true", help=argparse.SUPPRESS)  # started by `lemma train --watch`
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from lemma.planning.plan_words import run_in_words
    from lemma.reports.live_page import Watch
    from lemma.reports.run_reader import open_runs
    from lemma.reports.run_state import is_run

    if not 0 <= args.port < 65536:
        raise UserError(f"--port is {args.port}", fix="write a number below 65536")
    orphaned = _orphaned() if args.beside else threading.Event()
    while args.beside and not all(map(is_run, args.runs)):
        if orphaned.wait(0.2):
            return 0
    watch = Watch(open_runs(args.runs), [run_in_words(one) for one in args.runs], args.port).start()
    note = "It goes when the training ends." if args.beside else "Ctrl-C stops the page, not the run."
    print(f"{watch.address}\n{note}", flush=True)
    if args.open:
        webbrowser.open(watch.address)
    try:
        orphaned.wait()
        threading.Event().wait(LINGER)
    except KeyboardInterrupt:
        print()
    finally:
        watch.close()
    return 0


@contextmanager
def watched(run_dir: str) -> Iterator[None]:
    """A page during the training in this block, in a process of its own so that it never slows a step."""
    command = [sys.executable, "-m", "lemma", "watch", "--beside", run_dir]
    page = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        page.terminate()
        page.wait()


def _orphaned() -> threading.Event:
    """Set when the process that started this one has ended, however that came about: its end of the pipe closes."""
    gone = threading.Event()

    def listen() -> None:
        sys.stdin.read()
        gone.set()

    threading.Thread(target=listen, daemon=True).start()
    return gone
