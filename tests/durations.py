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
    if hasattr(session.config, "workerinput"):
        return
    long = sorted((name, spent) for name, spent in seconds.items() if spent >= LEAST_SECONDS)
    DURATIONS.write_text(HEADER + "".join(f"{spent:6.1f} {name}\n" for name, spent in long), encoding="utf-8")
