"""A rank that ends before it has met the others, and a meeting point that never answers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator

import pytest
from torch.distributed import PrefixStore, TCPStore

from lemma.cluster.arrival import agreed_start
from lemma.cluster.rank_watch import LOST
from lemma.core.errors import UserError
from tests.preloaded import Python

FROM_PYTHON = """
import lemma

lemma.train("nowhere.yaml")
"""
JOINS = """
import sys
from lemma.cluster import joining
from lemma.cluster.cluster_options import ClusterOptions

joining.START_SECONDS, joining.ANSWER_SECONDS = 2.0, 1.0
with joining.member(ClusterOptions(), "cpu"):
    pass
"""
CANNOT_READ = """
import sys
from lemma.cli import main
from lemma.cluster import joining

joining.WORD_SECONDS = float(sys.argv[1])
sys.argv[1:] = ["train", "nowhere.yaml"]
sys.exit(main())
"""


@pytest.fixture
def mute() -> Iterator[int]:
    """The port of somebody who accepts connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def rank(number: int, port: int, program: str, *arguments: str) -> Python:
    place = {"RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return Python(["-c", program, *arguments], env={**os.environ, **place}, stderr=subprocess.PIPE)


@pytest.mark.parametrize("program", [CANNOT_READ, FROM_PYTHON], ids=["command", "python"])
def test_the_first_rank_says_why_another_is_not_there(program: str) -> None:
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    ends = rank(1, store.port, program, "10.0")
    with pytest.raises(UserError, match=r"rank 1 on .*: there is no recipe nowhere.yaml"):
        agreed_start(PrefixStore("lemma/", store), 0, 2, 30.0)
    assert "there is no recipe nowhere.yaml" in ends.communicate(timeout=30)[1] and ends.returncode > 0


def test_a_meeting_point_that_never_answers_is_not_waited_for(mute: int) -> None:
    joins = rank(1, mute, JOINS)
    said = joins.communicate(timeout=60)[1]
    assert joins.returncode == LOST and "rank 0 was there and does not answer at the start" in said


def test_a_rank_that_ends_early_does_not_wait_for_a_meeting_point_that_never_answers(mute: int) -> None:
    ends = rank(1, mute, CANNOT_READ, "1.0")
    said = ends.communicate(timeout=60)[1]
    assert ends.returncode == 2 and said.startswith("lemma: error: there is no recipe nowhere.yaml")
    assert said.count("\n") == 1


def test_ctrl_c_while_a_rank_tells_why_it_ends(mute: int) -> None:
    ends = rank(1, mute, CANNOT_READ, "600.0")
    assert ends.stderr is not None and "nowhere.yaml" in ends.stderr.readline()
    time.sleep(3.0)
    ends.send_signal(signal.SIGINT)
    assert ends.communicate(timeout=30)[1] == "" and ends.returncode == 2
