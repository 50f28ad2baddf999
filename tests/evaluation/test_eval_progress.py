"""Progress of an evaluation by tokens."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from lemma.core.events import Event, Progressed
from lemma.evaluation import eval_progress
from lemma.evaluation.eval_progress import Meter
from lemma.reporting.console import Pace
from tests.rollouts.scripted import Silent


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("lemma.evaluation.eval_progress.time.monotonic", clock)
    return clock


def test_time_left_of_samples_that_all_run_side_by_side(clock: Clock) -> None:
    """Ten samples a second apart in length, from 91 to 100 tokens, one token a second each: 100 s in all."""
    heard: list[Progressed] = []
    meter = Meter(10, 1000, lambda event: heard.append(event) if isinstance(event, Progressed) else None)
    pace, left = Pace(0, 10), {}
    sampled = 0
    for second in range(1, 101):
        clock.now += 1
        sampled += sum(second <= 91 + sample for sample in range(10))
        meter.look(sampled)
        if second > 90:
            meter.graded(second, right=second % 2 == 1)
        last = heard[-1]
        pace.reach(last.done, last.total, last.share)
        left[second] = pace._rate(2) and (1 - pace.share) / pace._rate(2)
    assert heard[-1].done == 10 and heard[-1].share == 1.0 and "50.0% right" in heard[-1].note
    assert left[95] < 20, "one finished sample tells how long the others are"
    assert "tokens/s" in heard[50].note
    shares = [event.share or 0.0 for event in heard]
    assert shares[50] < 0.1, "until one is finished, the longest allowed stands for all"
    assert all(0 <= share <= 1 for share in shares)


def test_what_a_journal_held_is_no_work(clock: Clock) -> None:
    heard: list[Event] = []
    meter = Meter(4, 100, heard.append)
    for _ in range(2):
        clock.now += 1e-6
        meter.graded(50, right=True)
    assert meter.share == 0.5
    assert "tokens/s" not in str(heard), "nothing was generated here"


def test_what_the_engine_sampled_before_is_no_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation counts the tokens of its own samples, those that are not finished as well."""
    monkeypatch.setattr(eval_progress, "LOOK_SECONDS", 0.01)
    engine, meter = Silent(), Meter(4, 100, lambda event: None)
    engine.sampled_tokens = 1000
    with meter.watching(engine, tmp_path):
        engine.sampled_tokens += 100
        until = time.monotonic() + 10
        while meter.share == 0.0 and time.monotonic() < until:
            time.sleep(0.01)
    assert meter.share == 0.25


def test_two_threads_tell_one_meter() -> None:
    counted: list[Progressed] = []
    meter = Meter(200, 10, lambda event: counted.append(event))  # type: ignore[arg-type]
    threads = [
        threading.Thread(target=lambda first=first: [meter.graded(3, True) for _ in range(first, first + 100)])
        for first in (0, 100)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counted[-1].done == 200 and eval_progress.SECONDS_BETWEEN_EVENTS > 0
