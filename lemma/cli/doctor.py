"""`lemma doctor`: what this machine has, whether it really works, and what repairs it."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from lemma.cli.parser import Parser
from lemma.core.terminal import unescaped, visible

if TYPE_CHECKING:
    from lemma.doctor.health import HealthFinding

DESCRIPTION = """\
Try every part that Lemma can use, each with a small real action, and say what repairs what is broken.
The exit code is 0 if the core works, whatever else is missing, and 1 otherwise."""

STYLES = {"ok": "green", "missing": "dim", "broken": "bold red"}


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    parser = subparsers.add_parser("doctor", help="try every part that Lemma can use", description=DESCRIPTION)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--deep", action="store_true", help="also try what takes long, such as torch.compile")
    parser.add_argument("--runs", metavar="FOLDER", default="runs", help="where runs will go (default: runs)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from lemma.doctor.health import core_works, examine

    waiting = Console(stderr=True).status("Trying every part ...") if sys.stderr.isatty() else nullcontext()
    with waiting:
        findings = examine(Path(args.runs), deep=args.deep)
    works = core_works(findings)
    if args.json:
        print(json.dumps({"ok": works, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        _print_table(findings)
        print("The core works." if works else "The core does not work: repair what is broken above.")
    return 0 if works else 1


def _print_table(findings: list[HealthFinding]) -> None:
    console = Console(file=unescaped(sys.stdout), highlight=False, soft_wrap=True)
    width = max(len(finding.part) for finding in findings)
    for finding in findings:
        state = "missing (optional)" if finding.state == "missing" else finding.state
        line = Text(f"{finding.part:<{width}}  ")
        line.append(f"{state:<18}  ", style=STYLES[finding.state])
        console.print(line.append(visible(finding.detail)))
        if finding.repair:
            console.print(Text(" " * (width + 22) + finding.repair, style="dim"))
