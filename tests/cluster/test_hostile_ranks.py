"""Code, machines and environments that mean no good: one clear sentence, soon, and nothing half done."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import pytest
import torch
from torch.distributed import HashStore

from lemma.cli import main
from lemma.cluster import joining
from lemma.cluster.cluster_options import ClusterOptions
from lemma.cluster.joining import member
from lemma.cluster.launching import Launcher
from lemma.cluster.rank_watch import LOST, RankLost, RankWatch, say_loss
from lemma.core.errors import UserError
from lemma.core.ranks import gather_over_ranks, rank
from lemma.learning import checkpoint
from lemma.learning.checkpoint import CheckpointStore
from tests.cluster.crew import Crew
from tests.cluster.forked import Forked
from tests.cluster.test_rank_faults import prepare

Kind = TypeVar("Kind", bound=Launcher)


def test_a_rank_that_ends_itself_is_named(tmp_path: Path) -> None:
    """A reward that leaves the process, well as it seems: who waited for it has nothing to explain."""
    leaves = "os.environ['RANK'] == '1' and ctypes.CDLL(None)._exit(0)"
    (tmp_path / "mine.py").write_text(f"import ctypes, os\n\n\ndef leaves(item):\n    {leaves}\n    return 1.0\n")
    launcher = Forked(prepare(tmp_path, reward=f"{tmp_path / 'mine.py'}:leaves"), restarts=0)
    assert launcher.run() == 1
    assert launcher.said == ["error: rank 1 ended with code 0 in the middle of the run, by its own doing"]
    assert "Traceback" not in launcher.output


def stops_at_the_start(words: list[str], changes: dict[str, str], output: Path) -> None:
    """One of two ranks stands still before it has met the other, or as soon as it may be met."""
    os.environ.update(changes)
    os.setsid()  # as a launcher starts them
    who, at_once = words
    if changes["RANK"] == who and at_once == "True":
        os.kill(os.getpid(), signal.SIGSTOP)
    joining.LAUNCHED_SECONDS = 2.0
    if changes["RANK"] == who:
        joining._port = lambda file, seconds: os.kill(os.getpid(), signal.SIGSTOP)  # type: ignore[assignment, return-value]
    try:
        with member(ClusterOptions(patience=2.0, deadline=2.0), "cpu"):
            pass
    except RankLost as error:
        say_loss(str(error), int(changes["RANK"]))
        os._exit(LOST)
    os._exit(0)


@pytest.mark.parametrize(
    ("who", "at_once", "said"),
    [
        (0, True, "rank 0 did not start within 2 s"),
        (0, False, "rank 0 was there and does not answer at the start"),
        (1, True, "rank 0 waited at 'the start', and rank 1 on an unknown host, last seen at 'the start' did not come"),
    ],
)
def test_a_rank_that_stands_still_before_it_has_met_the_others(
    tmp_path: Path, who: int, at_once: bool, said: str
) -> None:
    launcher = Forked(tmp_path, restarts=0, program=stops_at_the_start)
    launcher._command = [str(who), str(at_once)]
    began = time.monotonic()
    assert launcher.run() == 1
    assert said in launcher.said[0] and len(launcher.said) == 1, launcher.said
    assert time.monotonic() - began < 45


class Programs(Launcher):
    """Ranks that are small programs of Python."""

    programs: Sequence[str] = ()

    def start_rank(self, command: Sequence[str], env: dict[str, str], output: Path | None) -> Any:
        return super().start_rank([sys.executable, "-S", "-c", self.programs[int(env["RANK"])]], env, output)


class Beyond(Launcher):
    """The machine has no room for a second rank."""

    def start_rank(self, command: Sequence[str], env: dict[str, str], output: Path | None) -> Any:
        if env["RANK"] == "1":
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return super().start_rank([sys.executable, "-S", "-c", "import time; time.sleep(60)"], env, output)


def launcher_of(kind: type[Kind], folder: Path, said: list[str], count: int = 2) -> Kind:
    return kind([], count, folder / "run", restarts=0, fresh=False, say=said.append)


def test_what_ranks_end_by(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A signal without a name; an error after more words than fit into memory."""
    said: list[str] = []
    ranks = launcher_of(Programs, tmp_path, said)
    waits = "import time; time.sleep(60)"
    ranks.programs = (waits, f"import os; os.kill(os.getpid(), {signal.SIGRTMIN + 3})")
    assert ranks.run() == 1
    ranks.programs = (waits, "print(('y' * 999 + '\\n') * 20_000)\nraise SystemExit('out of words')")
    assert ranks.run() == 1
    assert said == [f"error: rank 1 was killed by signal {signal.SIGRTMIN + 3}", "error: out of words"]
    assert len(capfd.readouterr().err) < 100_000


def test_a_machine_that_starts_no_more_processes(tmp_path: Path) -> None:
    ranks = launcher_of(Beyond, tmp_path, [], 3)
    with pytest.raises(
        UserError, match=r"rank 1 of 3 cannot be started \(Resource temporarily unavailable\); start fewer"
    ):
        ranks.run()
    assert [rank.poll() for rank in ranks._ranks] == [-signal.SIGKILL], "the first one is not left behind"


def test_more_ranks_than_a_machine_has_cores_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before a thousand processes are started, each with a model of its own."""
    assert main(["train", str(prepare(tmp_path) / "recipe.yaml"), "--ranks", "10000"]) == 2
    assert "error: 10000 ranks are too many for the " in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_port_that_there_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "99999"}.items():
        monkeypatch.setenv(name, text)
    with (
        pytest.raises(UserError, match="MASTER_PORT is 99999, and there is no such port"),
        member(ClusterOptions(), "cpu"),
    ):
        pass


def test_why_a_wait_failed() -> None:
    """Without places in gloo's sources; what only this rank lacks is nobody else's fault."""
    watch = RankWatch(HashStore(), 0, 2, patience=1.0)
    watch.start()
    closed = "[/build/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:28817. This is typically"
    with (
        pytest.raises(RankLost, match=r"\(Connection closed by peer \[127\.0\.0\.1\]:28817\)$"),
        watch.waiting("a sum"),
    ):
        raise RuntimeError(closed)
    full = "[enforce fail at /build/gloo/transport/tcp/loop.cc:48] rv != -1. -1 vs -1. pipe: Too many open files"
    with pytest.raises(UserError, match="rank 0 has too many open files; raise the limit"), watch.waiting("a sum"):
        raise RuntimeError(full)
    watch.stop()


def read_by_one(folder: Path) -> str:
    """A checkpoint of which the second rank may not read a file."""
    store = CheckpointStore(folder, keep=1, say=lambda text: None)
    store.save(1, {f"weight/w{rank()}": torch.ones(2)}, {})
    store.wait()
    gather_over_ranks(None)
    trouble = {} if rank() == 0 else {"side_effect": PermissionError(13, "not you")}
    with mock.patch.object(checkpoint, "load_file", return_value={}, **trouble):
        try:
            store.newest()
        except UserError as error:
            return str(error)
    return "read"


def test_a_checkpoint_that_only_the_first_rank_can_read(crew: Crew, tmp_path: Path) -> None:
    (said,) = set(crew.run(2, read_by_one, tmp_path))
    assert "rank 1 cannot read the checkpoint of step 1 in " in said and "not you), and rank 0 can; see that" in said


LISTENS = """
import psutil
from lemma.cluster.cluster_options import ClusterOptions
from lemma.cluster.joining import member
with member(ClusterOptions(), "cpu"):
    print(*sorted({one.laddr.ip for one in psutil.Process().net_connections() if one.status == "LISTEN"}))
"""


@pytest.mark.parametrize("launched", ["by lemma train", "by hand"])
def test_ranks_of_one_machine_listen_to_nobody_else(tmp_path: Path, launched: str) -> None:
    """Neither the store at which they meet nor gloo."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    place = {"LEMMA_MEETING": str(tmp_path)} if launched == "by lemma train" else {"MASTER_ADDR": "127.0.0.1"}
    env = {**os.environ, "WORLD_SIZE": "2", "MASTER_PORT": port, **place}
    ranks = [
        subprocess.Popen([sys.executable, "-c", LISTENS], env=env | {"RANK": str(n)}, stdout=subprocess.PIPE, text=True)
        for n in range(2)
    ]
    assert [one.communicate(timeout=120)[0].strip() for one in ranks] == ["127.0.0.1"] * 2
