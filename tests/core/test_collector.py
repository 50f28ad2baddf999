"""The collector is kept off what there was before, and is as it was afterwards."""

from __future__ import annotations

import gc
import weakref

import pytest

from lemma.core.collector import set_aside


class Ring:
    def __init__(self) -> None:
        self.own = self


def test_what_there_was_is_not_looked_at_and_what_came_is_collected() -> None:
    before = gc.get_freeze_count()
    with pytest.raises(KeyError), set_aside():
        assert gc.get_freeze_count() > before
        Ring()
        assert gc.collect() >= 1, "a ring that was made within is found"
        raise KeyError
    assert gc.get_freeze_count() == 0


def test_garbage_from_before_is_not_kept() -> None:
    ring = Ring()
    seen = weakref.ref(ring)
    del ring
    with set_aside():
        assert seen() is None
