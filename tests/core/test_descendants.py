"""What a process that watches over others ends, where it may look at others' processes and where it may not."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

PROGRAM = """
import subprocess, sys
import psutil
from lemma.core.descendants import adopt_orphans, end_descendants

if sys.argv[1] == "blind":
    def refuse(*given, **more):
        raise psutil.AccessDenied()
    psutil.Process.children = refuse
adopt_orphans()
command = [sys.executable, "-c", "import time; time.sleep(600)"]
child = subprocess.Popen(command, start_new_session=True)
print(child.pid, flush=True)
end_descendants()
"""


@pytest.mark.parametrize("sight", ["sees", "blind"])
def test_a_child_in_a_session_of_its_own_is_ended(sight: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, sight], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    pid, until = int(done.stdout), time.monotonic() + 10
    while _lives(pid):
        assert time.monotonic() < until, "it outlived its watcher"
        time.sleep(0.05)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
