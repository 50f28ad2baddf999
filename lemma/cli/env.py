"""`lemma env play | setup | test`: look at episodes turn by turn, install an environment, try it before training."""

from __future__ import annotations

import argparse
import importlib

from lemma.cli.parser import Parser

# What can be done with an environment, and the module of this folder for it, with `add(parser)` and `run(args)`.
ACTIONS: dict[str, tuple[str, str]] = {
    "play": ("env_play", "print episodes turn by turn: what was read, sampled and learnt from"),
    "setup": ("env_setup", "install an environment that wants a virtual environment of its own"),
    "test": ("env_test", "try an environment: its calls, its deadlines, and whether an episode repeats"),
}


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    parser = subparsers.add_parser("env", help="look at an environment", description="Play and try environments.")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    for name, (module, purpose) in ACTIONS.items():
        command = importlib.import_module(f"lemma.cli.{module}")
        action = actions.add_parser(name, help=purpose, description=command.DESCRIPTION)
        command.add(action)
        action.set_defaults(run=command.run)
