"""A benchmark as rows: each is a JSON object that says what to run, and runs in its own process.

The result of a row is stored with `made`: the date, the commit, the command, the device and the versions.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

Row = dict[str, Any]
PEERS = {
    "flash_attn.cute": "flash-attn-4",
    "trl": "trl",
    "peft": "peft",
    "liger_kernel": "liger-kernel",
    "bitsandbytes": "bitsandbytes",
}


def run_rows(
    module: str,
    about: str | None,
    runners: dict[str, Callable[[Row], Row]],
    rows: Callable[[], list[Row]] | Mapping[str, list[Row]],
    *,
    options: Row | None = None,
    table: Callable[[list[Row]], str] | None = None,
) -> None:
    """The command line of a benchmark: `--row` runs one row here, otherwise all rows run, one process each.

    `runners` are the programs that are compared, by the name that a row gives as `who`. `rows` are all of them, or sets
    of them by name, of which `--set` chooses. `options` are values that every row has, with their defaults: each is an
    option of the command, which counts where a row does not say otherwise. `table` shows all results at the end.
    """
    sets = {"all": rows()} if callable(rows) else dict(rows)
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", help="one row, as JSON")
    parser.add_argument("--rows", help="several rows, as a JSON list")
    parser.add_argument("--set", nargs="+", choices=list(sets), default=[next(iter(sets))], help="named sets of rows")
    parser.add_argument("--out", type=Path, help="file for the results, one JSON object a line")
    parser.add_argument("--table", type=Path, help="file for the table")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds a row may take, unless it says more itself")
    parser.add_argument("--within", type=float, default=float("inf"), help="seconds that all rows may take together")
    parser.add_argument("--over", default="{}", help="values that replace those of every row, as JSON")
    for name, value in (options or {}).items():
        parser.add_argument(f"--{name}", type=type(value), default=value, help=f"default: {value}")
    arguments = parser.parse_args()
    common = {name: getattr(arguments, name) for name in options or {}}
    over = json.loads(arguments.over)
    if arguments.row:
        row = common | json.loads(arguments.row) | over
        print(json.dumps(runners[row["who"]](row) | {"made": versions()}))
        return
    chosen = json.loads(arguments.rows) if arguments.rows else [row for name in arguments.set for row in sets[name]]
    ends = time.monotonic() + arguments.within
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a row that runs ends as well
    made = {"commit": commit(), "command": as_typed(module, sys.argv[1:])}
    results: list[Row] = []
    for row in chosen:
        limit = min(row.get("limit", arguments.limit), ends - time.monotonic())
        result = _in_a_process(module, common | row | over, limit)
        results.append(result | {"made": {**made, "date": f"{datetime.now(UTC):%Y-%m-%d}", **result.pop("made", {})}})
        print(json.dumps(results[-1]), flush=True)
        if arguments.out:
            arguments.out.write_text("\n".join(json.dumps(result) for result in results) + "\n")
        shown = "" if table is None else f"{table(results)}\n\n{made_by(results)}\n"
        if arguments.table and shown:
            arguments.table.write_text(shown)
    if table is not None:
        print(f"\n{shown}")


def as_typed(module: str, arguments: Sequence[str]) -> str:
    """The command line, without the output path."""
    files = {place for i, word in enumerate(arguments) if word in ("--out", "--table") for place in (i, i + 1)}
    return shlex.join(["python", "-m", module, *(word for i, word in enumerate(arguments) if i not in files)])


def commit() -> str | None:
    """What was measured: LEMMA_COMMIT where there is no repository; "+" where files differ from the commit."""
    if told := os.environ.get("LEMMA_COMMIT"):
        return told
    here = Path(__file__).parent
    asked = ["git", "-C", str(here), "describe", "--always", "--dirty=+", "--exclude=*"]
    with contextlib.suppress(OSError):
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        return done.stdout.strip() or None
    return None


def versions() -> Row:
    """The device and the versions of what this process has used."""
    import torch
    import transformers

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    peers: Row = {}
    for used, shown in PEERS.items():
        if used in sys.modules:
            # A module may belong to another package, such as FlashAttention 2.
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                peers[shown] = importlib.metadata.version(shown)
    return {"device": name, "torch": torch.__version__, "transformers": transformers.__version__, **peers}


def made_by(results: Sequence[Row]) -> str:
    """Who made a table: a line for each date, commit, device and command, and the versions that any row used."""
    kinds: dict[tuple[Any, ...], dict[str, str]] = {}
    for result in results:
        made = dict(result["made"])
        facts = tuple(made.pop(name, None) for name in ("date", "device", "commit", "command"))
        kinds.setdefault((facts[0], facts[2], facts[3]), {}).update(made | ({"on": facts[1]} if facts[1] else {}))
    lines = []
    for (date, revision, command), used in kinds.items():
        packages = ", ".join(f"{name} {version}" for name, version in used.items() if name != "on")
        known = [f"{date}, {used.get('on', 'no device')}, commit {revision}", packages, f"`{command}`"]
        lines.append("; ".join(part for part in known if part))
    return "\n".join(lines)


def trouble(result: Row) -> str:
    """Why a row has no result, for a table cell."""
    return str(result["error"]).rpartition(" | ")[2]


def spread(values: Sequence[float]) -> float:
    """(max - min) / median."""
    ordered = sorted(values)
    middle = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
    return (ordered[-1] - ordered[0]) / middle if middle else 0.0


def _in_a_process(module: str, row: Row, limit: float) -> Row:
    if limit <= 1.0:
        return row | {"error": "not run: the time of this command was over"}
    command = [sys.executable, "-m", module, "--row", json.dumps(row)]
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )  # a session of its own, so that what it started ends with it
    try:
        said, troubles = child.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        return row | {"error": f"longer than {limit:.0f} s"}
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
    if child.returncode == 0:
        return json.loads(said.splitlines()[-1])
    lines = [line for line in troubles.splitlines() if line.strip()]
    return row | {"error": " | ".join(lines[-4:])[-800:]}
