"""`lemma env setup appworld`: install an environment that wants a virtual environment of its own."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lemma.cli.parser import Parser

DESCRIPTION = """\
Install an environment that cannot share Lemma's own packages. AppWorld gets a virtual environment in DIR/venv;
its tasks belong in DIR/data, and the command says how to get them."""


def add(parser: Parser) -> None:
    parser.add_argument("name", metavar="NAME", choices=["appworld"], help="appworld")
    parser.add_argument("--dir", metavar="DIR", default="appworld", help="its folder (default: appworld)")
    parser.add_argument("--python", metavar="PYTHON", default=sys.executable, help="which Python (default: Lemma's)")


def run(args: argparse.Namespace) -> int:
    from lemma.environments.appworld.appworld_setup import data_advice, set_up

    root = Path(args.dir).expanduser()
    venv = root / "venv"
    root.mkdir(parents=True, exist_ok=True)
    set_up(venv, args.python)
    if (root / "data" / "tasks").is_dir():
        print(f"Its tasks are in {root / 'data'}. Try it: lemma env test appworld --set root={root}")
    else:
        print("\n".join(data_advice(root, venv)))
    return 0
