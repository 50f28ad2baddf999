"""Work beside other work: one piece after the other, and no error is lost."""

from __future__ import annotations

import threading

import pytest

from lemma.core.beside import Beside


def test_pieces_come_one_after_the_other() -> None:
    go, order = threading.Event(), []
    with Beside() as beside:
        beside.do(lambda: (go.wait(10), order.append("first"))[1])
        beside.do(lambda: order.append("second"))
        order.append("meanwhile")
        go.set()
        beside.settle()
        order.append("settled")
    assert order == ["meanwhile", "first", "second", "settled"]


def test_an_error_is_raised_when_the_work_is_waited_for_and_what_follows_is_done() -> None:
    def fail() -> None:
        raise OSError("no space")

    beside = Beside()
    done: list[int] = []
    beside.do(fail)
    beside.do(lambda: done.append(1))
    with pytest.raises(OSError, match="no space"):
        beside.settle()
    beside.settle()
    assert done == [1]
    with pytest.raises(OSError, match="no space"), Beside() as beside:
        beside.do(fail)
    with pytest.raises(ValueError, match="its own"), Beside() as beside:
        beside.do(fail)
        raise ValueError("its own")
