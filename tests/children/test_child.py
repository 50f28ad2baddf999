"""Child processes: what is told and heard, what takes too long, how they end, and what ends with them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lemma.children import ChildGone, ChildSilent, PythonChild
from lemma.children.child_frames import NotAFrame, pack, receive, unpack
from tests.environments.trouble import STRAY, alive, wait_for_end

SERVE = f"""
import os, sys, time
{STRAY}
def serve(channel):
    channel.send({{"ready": os.getpid()}})
    while (order := channel.receive()) is not None:
        print("printed")
        channel.send(perform(channel, order))
        if order["do"] == "leave":
            return

def perform(channel, order):
    match order["do"]:
        case "read":
            return sys.stdin.read()
        case "stray":
            leave_stray(order["file"])
        case "wait":
            time.sleep(600)
        case "compute":
            end = time.process_time() + order["cpu"]
            while time.process_time() < end:
                pass
        case "die":
            print("so sorry", file=sys.stderr, flush=True)
            os._exit(3)
        case "shout":
            sys.stderr.write("x" * 3_000_000)
        case "nonsense":
            os.write(channel._out.fileno(), b"\\xff" * 99)
        case "dribble":
            os.write(channel._out.fileno(), b"\\0\\0\\xff\\xff")
            while True:
                os.write(channel._out.fileno(), b" ")
                time.sleep(0.05)
    return order
"""


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., PythonChild]]:
    (tmp_path / "served_here.py").write_text(SERVE)
    monkeypatch.syspath_prepend(str(tmp_path))
    made: list[PythonChild] = []

    def make(**more: Any) -> PythonChild:
        made.append(PythonChild("served_here:serve", **more))
        made[-1].wait_until_ready(60)
        return made[-1]

    yield make
    for worker in made:
        worker.end()


def ask(worker: PythonChild, do: str, seconds: float = 30.0, **more: Any) -> Any:
    worker.tell({"do": do, **more}, seconds)
    return worker.receive(seconds)


def test_messages_are_plain_data() -> None:
    content = {"text": "half \ud800 é\n", "number": 0.1, "none": None}
    buffer = bytearray(pack(content) + pack({"array": np.arange(3), "odd": 1j}) + pack("cut")[:-1])
    assert list(unpack(buffer)) == [content, {"array": [0, 1, 2], "odd": "1j"}] and buffer == pack("cut")[:-1]
    parts = iter([pack(content)[:2], pack(content)[2:4], pack(content)[4:], b""])
    assert receive(lambda count: next(parts)) == content
    with pytest.raises(EOFError):
        receive(lambda count: b"")


@pytest.mark.parametrize("data", [b"\xff" * 9, pack("x")[:-1] + b"x", b"\0\1\x86\xa0" + b"[" * 100_000])
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(NotAFrame):
        list(unpack(bytearray(data)))


def test_a_worker_hears_and_says_nothing_but_messages(make: Any) -> None:
    worker = make()
    assert worker.greeting["ready"] != worker.process.pid, "the first process watches"
    long = "é" * 300_000
    assert ask(worker, "echo", text=long) == {"do": "echo", "text": long}, "more than a pipe holds"
    assert ask(worker, "read") == ""
    assert ask(worker, "shout") and ask(worker, "echo")
    assert os.fstat(worker._own_stderr.fileno()).st_size < 2**20, "it is not kept"


def test_a_last_message_is_heard_before_the_end(make: Any) -> None:
    worker = make()
    worker.tell({"do": "leave"}, 30)
    wait_for_end([worker.greeting["ready"]])
    assert worker.receive(30) == {"do": "leave"}
    with pytest.raises(ChildGone, match="exit code 0"):
        worker.receive(30)


def test_how_it_ended(make: Any) -> None:
    with pytest.raises(ChildGone, match=r"^exit code 3: so sorry$"):
        ask(make(), "die")
    for is_watched in (True, False):
        worker = make(is_watched=is_watched)
        os.kill(worker.greeting["ready"], signal.SIGKILL)
        with pytest.raises(ChildGone, match=r"^signal 9"):
            ask(worker, "echo")
    with pytest.raises(ChildGone, match="no message"):
        ask(make(), "nonsense")


@pytest.mark.parametrize("do", ["wait", "dribble"])
def test_silence_and_bytes_that_make_no_message_have_the_same_limit(make: Any, do: str) -> None:
    worker, began = make(), time.monotonic()
    with pytest.raises(ChildSilent):
        ask(worker, do, 0.5)
    assert 0.5 <= time.monotonic() - began < 5


def test_time_in_which_a_child_computes_counts_only_for_the_impatient(make: Any) -> None:
    patient = make(is_watched=False, is_patient=True)
    assert ask(patient, "compute", 0.5, cpu=1.2)["cpu"] == 1.2
    used = patient.cpu_seconds()
    assert used > 1.2
    os.kill(patient.process.pid, signal.SIGSTOP)
    with pytest.raises(ChildSilent):
        patient.tell({"do": "echo", "text": "x" * 300_000}, 0.3)
    patient.end()
    assert patient.cpu_at_end >= used
    with pytest.raises(ChildSilent):
        ask(make(is_watched=False), "compute", 0.5, cpu=1.2)


@pytest.mark.parametrize("way", ["ended", "worker killed", "watcher killed", "input closed"])
def test_what_it_started_ends_with_it(make: Any, tmp_path: Path, way: str) -> None:
    worker = make()
    ask(worker, "stray", file=str(tmp_path / "stray"))
    stray, inner = int((tmp_path / "stray").read_text()), worker.greeting["ready"]
    assert alive(stray) and os.getsid(stray) not in (worker.process.pid, inner)
    if way == "ended":
        worker.end()
    elif way == "worker killed":
        os.kill(inner, signal.SIGKILL)
    elif way == "watcher killed":
        worker.process.kill()
    else:
        worker.process.stdin.close()
    wait_for_end([inner] if way == "watcher killed" else [inner, stray])
    if way == "watcher killed":  # nobody is left who could know of it
        os.kill(stray, signal.SIGKILL)


PARENT = """
import os, sys, time
from lemma.children import PythonChild

workers = [PythonChild("served_here:serve", is_watched=watched) for watched in (True, False)]
for worker in workers:
    worker.wait_until_ready(60)
    worker.tell({"do": "wait"}, 9)
if os.fork() == 0:
    time.sleep(600)
print(*[pid for worker in workers for pid in (worker.process.pid, worker.greeting["ready"])], flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the signal at a parent's death is Linux's")
def test_none_outlives_a_killed_parent_although_a_fork_of_it_holds_the_pipes(make: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True, env=env) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(set(pids)) == 3 and all(map(alive, pids))
        os.kill(parent.pid, signal.SIGKILL)
        wait_for_end(pids)
        os.killpg(parent.pid, signal.SIGKILL)


@pytest.mark.parametrize("more", [(), ("watched",)])
def test_a_worker_does_not_start_for_a_parent_that_is_gone(make: Any, more: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "lemma.children.child_main", "served_here:serve", "1", *more]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    assert subprocess.run(command, stdin=subprocess.PIPE, env=env, timeout=60).returncode == 1


def test_a_thread_listens(make: Any) -> None:
    worker, heard = PythonChild("served_here:serve"), []
    worker.listen(heard.append)
    worker.send({"do": "leave"})
    until = time.monotonic() + 60
    while None not in heard and time.monotonic() < until:
        time.sleep(0.02)
    assert heard == [{"ready": heard[0]["ready"]}, {"do": "leave"}, None] and worker.is_ready
    worker.end()
