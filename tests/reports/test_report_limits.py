"""The limits of a report: time, memory and size for a thousand steps of 512 samples."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.reports.conftest import Page
from tests.reports.made_runs import long_run

CHILD = """
import resource, sys
from lemma.cli import main
code = main(["report", sys.argv[1], "--to", sys.argv[2]])
usage = resource.getrusage(resource.RUSAGE_SELF)
# ru_maxrss of a child begins with what its parent held.
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(usage.ru_utime + usage.ru_stime, peak)
sys.exit(code)
"""


@pytest.mark.serial
def test_a_thousand_steps_of_512_samples(tmp_path: Path, chromium: Any) -> None:
    run = long_run(tmp_path / "run", steps=1000, samples=512, tokens=200)
    to = tmp_path / "report.html"
    done = subprocess.run([sys.executable, "-c", CHILD, str(run), str(to)], capture_output=True, text=True, check=True)
    seconds, kilobytes = map(float, done.stdout.splitlines()[-1].split())
    assert seconds <= 20, "of CPU: on an idle machine these are the seconds that one waits"
    assert kilobytes <= 2**20
    assert to.stat().st_size <= 10_000_000
    page = Page(chromium)
    tab = page.open(to.as_uri())
    ready = tab.evaluate("performance.now()")
    tab.click("#tab-completions")
    tab.wait_for_selector("#detail .token")
    page.close()
    assert ready < 4000, "two seconds on an idle machine"
    assert page.troubles == []
