"""Signs of life in a store: who is heard, and what that asks of the store."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore

from lemma.cluster.rank_watch import RankWatch


class Counted:
    """A store that counts what is asked of it."""

    def __init__(self, store: Any):
        self._store, self.calls = store, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self._store, name)


def test_a_large_group_is_heard_with_one_question() -> None:
    size = 40
    tcp = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)
    store = Counted(PrefixStore("lemma/watch", tcp))
    ranks = [RankWatch(store, rank, size, patience=30.0) for rank in range(size)]
    for rank in ranks[:-1]:
        rank._beat()
    ranks[0]._listen()
    assert set(ranks[0]._heard) == set(range(size - 1)), "one has not begun"
    ranks[-1].note("the end")
    ranks[-1]._beat()
    ranks[0]._listen()
    assert ranks[0]._place_of(size - 1) == "the end" and ranks[0]._missing() == list(range(1, size))
    store.calls.clear()
    before = dict(ranks[0]._heard)
    ranks[7]._beat()
    ranks[0]._listen()
    assert store.calls == {"set": 1, "multi_get": 1}
    assert [rank for rank in range(size) if ranks[0]._heard[rank] != before[rank]] == [7]
