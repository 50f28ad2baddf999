"""Background work: one task at a time, and no error is lost."""

from __future__ import annotations

import threading

import pytest

from lemma.core.files import BackgroundWork


def test_pieces_come_one_after_the_other() -> None:
    go, order = threading.Event(), []
    with BackgroundWork() as background:
        background.submit(lambda: (go.wait(10), order.append("first"))[1])
        background.submit(lambda: order.append("second"))
        order.append("meanwhile")
        go.set()
        background.wait()
        order.append("waited")
    assert order == ["meanwhile", "first", "second", "waited"]


def test_an_error_is_raised_when_the_work_is_waited_for_and_what_follows_is_done() -> None:
    def fail() -> None:
        raise OSError("no space")

    background = BackgroundWork()
    done: list[int] = []
    background.submit(fail)
    background.submit(lambda: done.append(1))
    with pytest.raises(OSError, match="no space"):
        background.wait()
    background.wait()
    assert done == [1]
    with pytest.raises(OSError, match="no space"), BackgroundWork() as background:
        background.submit(fail)
    with pytest.raises(ValueError, match="its own"), BackgroundWork() as background:
        background.submit(fail)
        raise ValueError("its own")
