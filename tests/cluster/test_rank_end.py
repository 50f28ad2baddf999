"""How ranks end: by an error, before others, and when somebody asks while they are started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lemma.cluster.launching import FreshStart, Launcher, is_begun_already
from lemma.runs.run_folder import RunFolder
from tests import preloaded
from tests.cluster.forked import Forked

PROGRAM = """
import atexit, sys, threading
import torch.distributed as dist
from lemma.cli import main

dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
threading.Thread(target=threading.Event().wait).start()  # stands for one that waits for a rank that is gone
atexit.register(print, "tidied up")
sys.argv[1:] = ["train", "nowhere.yaml"]
sys.exit(main())
"""


def test_a_rank_that_fails_says_one_sentence_and_ends(tmp_path: Path) -> None:
    """With its own code, after tidying up, whatever the threads of its groups do."""
    done = preloaded.run(["-c", PROGRAM, tmp_path / "meet"], timeout=60)
    assert done.returncode == 2 and done.stdout == "tidied up\n"
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("lemma: "))
    assert "error: " in line and "nowhere.yaml" in line


INTERRUPTED = """
import atexit, os, pathlib, signal, sys
import lemma.cli, lemma.cli.doctor

def interrupted(options):
    print("said to nobody")
    atexit.register(tidied.touch)
    os.kill(os.getpid(), signal.SIGINT)

lemma.cli.doctor.run = interrupted
tidied = pathlib.Path(sys.argv[1])
sys.argv[1:] = ["doctor"]
sys.exit(lemma.cli.main())
"""


@pytest.mark.parametrize("closed", ["stdout", "stderr", "both"])
def test_an_interrupted_program_ends_quietly_where_nobody_reads_its_output_any_more(
    tmp_path: Path, closed: str
) -> None:
    """Ctrl-C ends the `tee` that it was piped to as well."""
    reads, writes = os.pipe()
    os.close(reads)
    out, err = (writes if closed in (name, "both") else subprocess.PIPE for name in ("stdout", "stderr"))
    env = {**os.environ, "PYTHONUNBUFFERED": ""}
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path / "tidied")]
    done = subprocess.run(command, stdout=out, stderr=err, text=True, timeout=60, env=env, check=False)
    os.close(writes)
    assert done.returncode == 130 and (tmp_path / "tidied").exists()
    assert done.stderr == (None if closed != "stdout" else "lemma: interrupted\n")


AT_WORK = """
import gc, pathlib, sys, threading, time
import torch
from lemma.cluster.rank_end import run_and_exit

def spin():
    x = torch.ones(256, 256)
    while True:
        x = torch.tanh(x @ x)

def write_late():
    time.sleep(1.0)
    pathlib.Path("late.txt").write_text("late")

def work():
    for _ in range(3):
        threading.Thread(target=spin, daemon=True).start()
    threading.Thread(target=write_late).start()
    work.log = open("log.txt", "w")
    work.log.write("in the buffer")
    gc.freeze()
    time.sleep(0.3)
    return int(sys.argv[1])

sys.exit(run_and_exit(work))
"""


@pytest.mark.parametrize("code", [0, 130])
def test_threads_inside_torch_do_not_abort_the_end_and_nothing_is_lost(tmp_path: Path, code: int) -> None:
    """A thread that is no daemon is waited for, and what is in the buffer of an open file gets to the disk."""
    done = preloaded.run(["-c", AT_WORK, str(code)], cwd=tmp_path, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")
    assert (tmp_path / "late.txt").read_text() == "late" and (tmp_path / "log.txt").read_text() == "in the buffer"


HANGING = """
import atexit, sys, threading
from lemma.cluster.rank_end import run_and_exit

def work():
    threading.Thread(target=threading.Event().wait).start()
    atexit.register(print, "tidied up")
    print("interrupted", flush=True)
    return 130

sys.exit(run_and_exit(work))
"""


def test_ctrl_c_ends_the_wait_for_a_thread_that_hangs() -> None:
    program = subprocess.Popen([sys.executable, "-c", HANGING], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert program.stdout is not None and program.stdout.readline() == b"interrupted\n"
    with pytest.raises(subprocess.TimeoutExpired):
        program.wait(1.0)
    program.send_signal(signal.SIGINT)
    assert program.communicate(timeout=30) == (b"tidied up\n", b"") and program.returncode == 130


def ends_early(words: list[str], changes: dict[str, str], output: Path) -> None:
    """Both ranks are done at once; the first one has something to write."""
    from lemma.cluster.cluster_options import ClusterOptions
    from lemma.cluster.joining import member

    os.environ.update(changes)
    with member(ClusterOptions(patience=3.0, deadline=30.0), "cpu") as world:
        time.sleep(5.0 if world.rank == 0 else 0.0)
    os._exit(0)


def test_a_rank_that_waits_for_the_last_one_is_not_taken_for_dead(tmp_path: Path) -> None:
    launcher = Forked(tmp_path, restarts=0, program=ends_early)
    assert launcher.run() == 0, launcher.said


class AskedTooEarly(Launcher):
    """Is asked to stop before the first rank is there."""

    def start_rank(self, command: Sequence[str], env: dict[str, str], output: Path | None) -> Any:
        if not self._ranks:
            os.kill(os.getpid(), signal.SIGTERM)
        return subprocess.Popen(["sleep", "60"], start_new_session=True)


def test_a_stop_between_two_attempts_is_not_lost(tmp_path: Path) -> None:
    said: list[str] = []
    began = time.monotonic()
    assert AskedTooEarly(["lemma"], 2, tmp_path, restarts=3, fresh=False, say=said.append).run() == 1
    assert said == ["rank 0 was killed by SIGTERM"] and time.monotonic() - began < 30


def begun(folder: Path, fresh: Sequence[str] = ()) -> RunFolder:
    """A run of two stages whose first rank has looked at the folder, and has learnt nothing yet."""
    run = RunFolder(folder)
    run.begin("stages: {}", "digest", 1, fresh=fresh)
    return run


@pytest.mark.parametrize("stages", [["sft", "rl"], ["rl"]])
def test_a_fresh_start_that_failed_is_fresh_again_until_there_is_something_new(
    tmp_path: Path, stages: list[str]
) -> None:
    """One that starts a single stage anew leaves the record of the run as it is."""
    begun(tmp_path).close()
    for name in ("sft", "rl"):
        (tmp_path / "stages" / name).mkdir(parents=True)
    (tmp_path / "metrics.jsonl").write_text('{"step": 500}\n')
    start = FreshStart(tmp_path, True)
    assert start.words == ["--fresh"] and start.progress_since((0, 500)) == (0, 500)
    begun(tmp_path, stages).close()
    assert start.words == ["--fresh"], "what was set aside will be put back"
    run = begun(tmp_path, stages)
    for name in stages:
        (tmp_path / "stages" / name).mkdir(parents=True)
    run.stage_began()
    run.close()
    assert start.words == [] and start.progress_since((0, 500)) == (0, 0), "steps of the earlier run do not count"
    assert start.words == [] and start.progress_since((0, 7)) == (0, 7)
    assert FreshStart(tmp_path, False).words == []


def test_a_command_that_torchrun_repeats_is_fresh_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher of this process is older than what is written now, and younger than the run of before."""
    begun(tmp_path).close()
    assert not is_begun_already(tmp_path), "nobody repeats this command"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert is_begun_already(tmp_path)
    begun(tmp_path, ["sft"]).close()
    assert not is_begun_already(tmp_path), "what was set aside will be put back"
    RunFolder(tmp_path).close()
    os.utime(tmp_path / "run.json", (1e9, 1e9))
    assert not is_begun_already(tmp_path)
    (tmp_path / "stages/sft").mkdir(parents=True)
    assert is_begun_already(tmp_path)
    assert not is_begun_already(tmp_path / "nothing")
