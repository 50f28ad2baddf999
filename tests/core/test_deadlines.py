"""Limits on the time that other people's code takes."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from lemma.core import deadlines
from lemma.core.deadlines import SIGNAL, Overdue, Stopwatch


def run_out(seconds: float, work: float) -> float:
    """How long a piece of work of `work` seconds goes on under a limit of `seconds`."""
    began = time.monotonic()
    with Stopwatch(seconds) as watch:
        watch.begin()
        try:
            time.sleep(work)
        except Overdue:
            pass
        finally:
            watch.end()
    return time.monotonic() - began


def test_a_limit_holds_after_its_thread_could_not_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "_guard", deadlines._Guard())
    before = signal.getsignal(SIGNAL)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as scarce:
        scarce.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"), Stopwatch(0.2):
            pass
    assert signal.getsignal(SIGNAL) is before
    assert run_out(0.2, 20) < 15
