"""A benchmark as rows: each is a JSON object that says what to run, and runs in a process of its own."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def run_rows(
    module: str,
    about: str | None,
    runners: dict[str, Callable[[Row], Row]],
    rows: Callable[[], list[Row]],
    *,
    options: Row | None = None,
    table: Callable[[list[Row]], str] | None = None,
) -> None:
    """The command line of a benchmark: `--row` runs one row here, otherwise all rows run, one process each.

    `runners` are the programs that are compared, by the name that a row gives as `who`. `options` are values that every
    row has, with their defaults: each is an option of the command. `table` shows all results at the end.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", help="one row, as JSON")
    parser.add_argument("--rows", help="several rows, as a JSON list")
    parser.add_argument("--out", type=Path, help="file for the results, one JSON object a line")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds a row may take")
    for name, value in (options or {}).items():
        parser.add_argument(f"--{name}", type=type(value), default=value, help=f"default: {value}")
    arguments = parser.parse_args()
    common = {name: getattr(arguments, name) for name in options or {}}
    if arguments.row:
        row = common | json.loads(arguments.row)
        print(json.dumps(runners[row["who"]](row)))
        return
    results = []
    for row in json.loads(arguments.rows) if arguments.rows else rows():
        results.append(_in_a_process(module, common | row, arguments.limit))
        print(json.dumps(results[-1]), flush=True)
        if arguments.out:
            arguments.out.write_text("\n".join(json.dumps(result) for result in results) + "\n")
    if table is not None:
        print(f"\n{table(results)}")


def _in_a_process(module: str, row: Row, limit: float) -> Row:
    command = [sys.executable, "-m", module, "--row", json.dumps(row)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return row | {"error": f"longer than {limit:.0f} s"}
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return row | {"error": " | ".join(lines[-4:])[-800:]}
