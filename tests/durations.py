"""A plugin that writes `durations.txt`: `make durations`, on an idle machine. A line may be written by hand as well."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

DURATIONS = Path(__file__).with_name("durations.txt")
HEADER = """\
# Seconds that a test takes a core, all cases together, where that is a second or more: `make durations` writes them.
# `make test` starts files with long tests first, and `make check` leaves these tests out.
"""
LEAST_SECONDS = 1.0

seconds: Counter[str] = Counter()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    seconds[report.nodeid.partition("[")[0]] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Lines of files that were not run stay, as long as the file is there."""
    if hasattr(session.config, "workerinput"):
        return
    measured = {name.partition("::")[0] for name in seconds}
    for line in DURATIONS.read_text(encoding="utf-8").splitlines():
        written, name = line.split(maxsplit=1)
        path = name.partition("::")[0]
        if written != "#" and path not in measured and (session.config.rootpath / path).is_file():
            seconds[name] = float(written)
    long = sorted((name, spent) for name, spent in seconds.items() if spent >= LEAST_SECONDS)
    DURATIONS.write_text(HEADER + "".join(f"{spent:6.1f} {name}\n" for name, spent in long), encoding="utf-8")
