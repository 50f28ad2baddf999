"""How ranks agree on a start, and what they hear of one that ends before it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed import HashStore

from lemma.cluster import arrival
from lemma.cluster.arrival import agreed_start, own_marks
from lemma.core.errors import UserError
from tests.pretended import pretend_installed

LIMIT = 30.0


def start(store: HashStore, rank: int, size: int, ending: str) -> str:
    """The name of the start, or why there is none."""
    try:
        return agreed_start(store, rank, size, LIMIT, ending)
    except UserError as error:
        return f"error: {error}"


def together(store: HashStore, size: int, endings: Mapping[int, str]) -> list[str]:
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: start(store, rank, size, endings.get(rank, "")), range(size)))


@pytest.mark.parametrize("who", [0, 1, 2])
def test_a_rank_that_ends_before_the_start_tells_all_the_others_why(who: int) -> None:
    began = time.monotonic()
    said = together(HashStore(), 3, {who: "beta: there is no file"})
    assert said == [f"error: rank {who} on beta: there is no file"] * 3
    assert time.monotonic() - began < LIMIT / 2


def test_what_was_said_at_an_earlier_start_does_not_count() -> None:
    store = HashStore()
    assert together(store, 2, {1: "beta: there is no file"})[0].startswith("error")
    first, second = together(store, 2, {})
    assert first == second and not first.startswith("error")


def test_ranks_that_never_come_are_not_waited_for_once_one_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrival, "HEARD_SECONDS", 0.3)
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(lambda rank: start(store, rank, 3, "beta: no disk" * rank), range(2)))
    assert said == ["error: rank 1 on beta: no disk"] * 2


def test_a_rank_that_comes_after_the_others_have_ended_says_why_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrival, "HEARD_SECONDS", 0.3)
    monkeypatch.setattr(arrival, "LATE_SECONDS", 0.5)
    store = HashStore()
    assert start(store, 0, 2, "alpha: no disk") == "error: rank 0 on alpha: no disk"
    began = time.monotonic()
    assert start(store, 1, 2, "") == "error: rank 0 on alpha: no disk"
    assert time.monotonic() - began < LIMIT / 2


def test_a_restart_has_time_to_name_its_own_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is there before the first one meets the end of the start before."""
    monkeypatch.setattr(arrival, "HEARD_SECONDS", 0.3)
    monkeypatch.setattr(arrival, "LATE_SECONDS", 10.0)
    store = HashStore()
    assert start(store, 0, 2, "alpha: no disk").startswith("error")
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(start, store, 1, 2, "")
        time.sleep(1.0)
        first = start(store, 0, 2, "")
        assert first == second.result() and not first.startswith("error")


def test_flash_attention_is_compared_where_it_may_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without = [own_marks({}, on_gpu) for on_gpu in (False, True)]
    pretend_installed("flash-attn-4", "4.0.0", tmp_path, monkeypatch)
    assert own_marks({}, False) == without[0], "on CPUs it makes no difference"
    assert own_marks({}, True) == without[1] | {"flash-attn-4": "4.0.0"}
