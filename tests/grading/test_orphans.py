"""Workers end with their parent, whatever happens to it and whatever they are doing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from time import monotonic, sleep

import pytest

from lemma.grading import GradingService
from lemma.grading.process import GradingProcess

TRAINER = r"""
import os, signal, sys, time
from lemma.grading import GradingService

service = GradingService(workers=2, cpu_seconds=1000)
service.start()
assert service.grade(r"\sum_{k=1}^{4} k", "10").right
for n in (2, 3):
    service.submit(r"\prod_{k=1}^{19999} (k^%d+1)" % n, r"\int_0^1 x dx")
if os.fork() == 0:
    time.sleep(600)
pids = [worker.process.pid for worker in service.pool.live.values()]
os.kill(pids[0], signal.SIGSTOP)
print(*pids, flush=True)
time.sleep(600)
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="the signal at a parent's death is Linux's")
def test_no_worker_outlives_a_killed_trainer() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", TRAINER], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as trainer:
        assert trainer.stdout is not None
        workers = [int(pid) for pid in trainer.stdout.readline().split()]
        assert len(workers) == 2 and all(map(is_running, workers))
        os.kill(trainer.pid, signal.SIGKILL)
        deadline = monotonic() + 60
        while any(map(is_running, workers)) and monotonic() < deadline:
            sleep(0.05)
        left = [pid for pid in workers if is_running(pid)]
        os.killpg(trainer.pid, signal.SIGKILL)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, "one was stopped and one was busy"


def test_a_worker_leaves_when_its_pipe_closes() -> None:
    worker = GradingProcess(1.0, 1024)
    worker.wait_until_ready(60)
    assert worker.process.stdin is not None
    worker.process.stdin.close()
    assert worker.process.wait(60) == 0
    worker.end()


def test_workers_belong_to_the_service_and_not_to_the_thread_that_started_it() -> None:
    with GradingService() as service:
        thread = threading.Thread(target=service.start)
        thread.start()
        thread.join()
        assert service.grade(r"\sum_{k=1}^{5} k", "15").right
        assert (service.counts["started"], service.counts["lost"]) == (1, 0)
