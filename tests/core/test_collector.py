"""The collector is kept off what there was before, and is as it was afterwards."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from lemma.core.collector import set_aside


class Ring:
    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    """All that there is, is frozen during the tests."""
    gc.unfreeze()
    yield
    gc.freeze()


def test_what_there_was_is_not_looked_at_and_what_came_is_collected() -> None:
    with pytest.raises(KeyError), set_aside():
        assert gc.get_freeze_count() > 0
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


def test_within_another_one_nothing_changes() -> None:
    """Threads of others free what is frozen: its exact number says nothing."""
    with set_aside():
        ring = Ring()
        seen = weakref.ref(ring)
        del ring
        with set_aside(collect=False):
            gc.collect()
            assert seen() is None, "the inner one does not freeze what came within the outer one"
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0


def test_without_collecting_no_pass_is_made() -> None:
    passes: list[str] = []

    def note(phase: str, _: dict[str, int]) -> None:
        passes.append(phase)

    gc.disable()
    gc.callbacks.append(note)
    try:
        with set_aside(collect=False):
            assert gc.get_freeze_count()
    finally:
        gc.callbacks.remove(note)
        gc.enable()
    assert not passes
