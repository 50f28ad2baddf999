"""Somebody who reaches the ports of the ranks and has not their key."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

from lemma.cluster.joining import shared_key
from lemma.core.errors import UserError
from lemma.core.rank_objects import KEY_VARIABLE, seal, unseal
from tests.cluster.forked import wait_for
from tests.preloaded import Python

RANK = """
from lemma.cluster.cluster_options import ClusterOptions
from lemma.cluster.joining import member
from lemma.core.errors import UserError
try:
    with member(ClusterOptions(), "cpu"):
        print("met")
except UserError as error:
    print(error)
"""
STRANGER = """
import sys
import torch.distributed as dist
class Order:
    def __reduce__(self):
        return open, (sys.argv[2], "w")
store = dist.PrefixStore("lemma//group", dist.TCPStore("127.0.0.1", int(sys.argv[1]), None, False))
dist.init_process_group("gloo", store=store, rank=1, world_size=2)
dist.new_group(backend="gloo")
dist.all_gather_object([None, None], Order())
"""


def test_a_stranger_who_joins_in_the_place_of_a_rank_is_not_read(tmp_path: Path) -> None:
    """With pickle, what is read is executed."""
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    place = {"RANK": "0", "WORLD_SIZE": "2", "LEMMA_MEETING": str(tmp_path), KEY_VARIABLE: "a secret"}
    rank = Python(["-c", RANK], env=env | place, stdout=subprocess.PIPE)
    wait_for((tmp_path / "port").exists)
    words = ["-c", STRANGER, (tmp_path / "port").read_text(), tmp_path / "executed"]
    stranger = Python(words, env=env, stderr=subprocess.DEVNULL)
    said = rank.communicate(timeout=120)[0]
    stranger.kill()
    stranger.wait()
    assert not (tmp_path / "executed").exists()
    assert "what came from rank 1 does not carry the key of this run; give the ranks of all machines the same" in said


def test_what_was_changed_on_its_way_is_not_read() -> None:
    sealed = seal({"a": [1, 2.5]}, b"key")
    assert unseal(sealed, b"key", 1) == {"a": [1, 2.5]}
    for other in (sealed[:-1], sealed + b".", b"", sealed[:32], bytes([sealed[0] ^ 1]) + sealed[1:]):
        with pytest.raises(UserError, match="does not carry the key"):
            unseal(other, b"key", 1)


def test_the_key_of_a_home_is_made_once_and_read_by_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    monkeypatch.setenv("LEMMA_CACHE", str(tmp_path / "cache"))
    key = shared_key()
    (file,) = (tmp_path / "cache").iterdir()
    assert len(key) == 64 and shared_key() == key and stat.S_IMODE(file.stat().st_mode) == 0o600
    monkeypatch.setenv(KEY_VARIABLE, "mine")
    assert shared_key() == b"mine"
    monkeypatch.delenv(KEY_VARIABLE)
    monkeypatch.setenv("LEMMA_CACHE", "/dev/null/x")
    with pytest.raises(UserError, match=rf"cannot be kept in .*set {KEY_VARIABLE}"):
        shared_key()
