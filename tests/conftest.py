"""What every test runs under: no network, no user caches, and, in strict mode, no skip without leave.

Strict mode is on under `make test` (LEMMA_STRICT_SKIPS=1) and in continuous integration (CI=true): a test that skips
for a reason that `allowed_skips.txt` does not name fails the run. It works with workers too (pytest-xdist): they report
to one controller, which judges.
"""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import tempfile
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

_cache = tempfile.mkdtemp(prefix="lemma-test-cache-")
atexit.register(shutil.rmtree, _cache, ignore_errors=True)
os.environ["LEMMA_CACHE"] = _cache
for _name, _value in {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "WANDB_MODE": "offline",
}.items():
    os.environ.setdefault(_name, _value)
# A script that starts the tests in the background has them ignore Ctrl-C, and all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

ALLOWED_SKIPS = Path(__file__).with_name("allowed_skips.txt")
DURATIONS = Path(__file__).with_name("durations.txt")
LONG_TESTS = Path(__file__).with_name("long_tests.txt")


# Marks of tests that run only where `-m` names them.
ONLY_WHEN_NAMED = ("kill", "seeds", "long", "machines", "realdata")


def pytest_configure(config: pytest.Config) -> None:
    wanted = config.option.markexpr
    parts = [f"({wanted})"] if wanted else []
    config.option.markexpr = " and ".join([*parts, *(f"not {mark}" for mark in ONLY_WHEN_NAMED if mark not in wanted)])
    # Not in pyproject.toml: pytest would import lemma before the plugin that counts what of it runs.
    config.addinivalue_line("filterwarnings", "error::lemma.core.errors.LemmaWarning")


def _durations() -> dict[str, float]:
    """Seconds of a core for each test, all cases together; quick ones are not listed."""
    lines = DURATIONS.read_text(encoding="utf-8").splitlines() if DURATIONS.is_file() else []
    pairs = [line.split() for line in lines if line and not line.startswith("#")]
    return {name: float(seconds) for seconds, name in pairs}


def _long_tests() -> dict[str, list[str]]:
    """Names of tests that `make test-long` runs, each with the cases that `make test` keeps."""
    lines = LONG_TESTS.read_text(encoding="utf-8").splitlines() if LONG_TESTS.is_file() else []
    entries = [line.split(" : ", 1)[0].partition(" but ") for line in lines if line and not line.startswith("#")]
    return {name: [case.strip() for case in kept.split(",")] for name, _, kept in entries}


def _is_long(item: pytest.Item, long_tests: dict[str, list[str]]) -> bool:
    name, _, case = item.nodeid.removesuffix("]").partition("[")
    return name in long_tests and (not case or case not in long_tests[name])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is slow or long, and put the files that take longest first: two workers end at about the same time.

    Crowded files come before them: they meet each other, and nothing that looks at the clock.
    """
    durations, seconds = _durations(), Counter[Path]()
    by_test: dict[tuple[str, Path], list[pytest.Item]] = {}
    for item in items:
        by_test.setdefault((item.nodeid.partition("[")[0], item.path), []).append(item)
    for (name, path), cases in by_test.items():
        seconds[path] += durations.get(name, 0.0)
        if name in durations:
            for case in cases:
                case.add_marker(pytest.mark.slow)
    long_tests = _long_tests()
    for item in items:
        if _is_long(item, long_tests):
            item.add_marker(pytest.mark.long)
    crowded = {item.path for item in items if item.get_closest_marker("crowded")}
    items.sort(key=lambda item: (item.path not in crowded, -seconds[item.path]))


def pytest_collection_finish() -> None:
    """A stage ends with a garbage collection: keep it from walking all of torch and every test, a second each time."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


def _is_strict() -> bool:
    return os.environ.get("CI") == "true" or os.environ.get("LEMMA_STRICT_SKIPS") == "1"


def _allowed() -> list[tuple[str, str]]:
    """Pairs of globs, for the test's id and for the reason."""
    lines = ALLOWED_SKIPS.read_text(encoding="utf-8").splitlines()
    pairs = [line.split(" : ", 1) for line in lines if line.strip() and not line.startswith("#")]
    return [(nodeid.strip(), reason.strip()) for nodeid, reason in pairs]


def _skips_without_leave(config: pytest.Config) -> list[str]:
    reporter = config.pluginmanager.getplugin("terminalreporter")
    assert reporter is not None, "strict skips need pytest's terminal reporter"
    unlisted = []
    for report in reporter.stats.get("skipped", []):
        reason = report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else ""
        if not any(fnmatchcase(report.nodeid, nodeid) and fnmatchcase(reason, why) for nodeid, why in _allowed()):
            unlisted.append(f"{report.nodeid} : {reason}")
    return unlisted


def pytest_sessionfinish(session: pytest.Session) -> None:
    is_worker = hasattr(session.config, "workerinput")
    if _is_strict() and not is_worker and _skips_without_leave(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not _is_strict():
        return
    unlisted = _skips_without_leave(config)
    if unlisted:
        terminalreporter.section("skipped without leave (tests/allowed_skips.txt)", sep="=", red=True)
        for line in unlisted:
            terminalreporter.line(line)
