"""Work beside other work: one piece after the other, and no error is lost."""

from __future__ import annotations

import threading

import pytest

from lemma.core.beside import Beside


def test_pieces_come_one_after_the_other() -> None:
    go, order = threading.Event(), []
    with Beside() as beside:
        beside.do(lambda: (go.wait(10), order.append("first"))[1])
        order.append("meanwhile")
        go.set()
        beside.do(lambda: order.append("second"))
    assert order == ["meanwhile", "first", "second"]


def test_an_error_is_raised_at_the_next_piece_or_at_the_end() -> None:
    def fail() -> None:
        raise OSError("no space")

    beside = Beside()
    beside.do(fail)
    with pytest.raises(OSError, match="no space"):
        beside.settle()
    beside.settle()
    with pytest.raises(OSError, match="no space"), Beside() as beside:
        beside.do(fail)
    with pytest.raises(ValueError, match="its own"), Beside() as beside:
        beside.do(fail)
        raise ValueError("its own")
