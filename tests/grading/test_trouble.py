"""What happens to a worker from outside is never held against an answer, and never remembered."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from time import sleep

import pytest

from lemma.grading import GradingService, Verdict
from lemma.grading.worker import PACE_SECONDS, allowed_seconds


def question(n: int) -> tuple[str, str]:
    return rf"\sum_{{k=1}}^{{{n}}} k", str(n * (n + 1) // 2)


@pytest.fixture(scope="module")
def service() -> Iterator[GradingService]:
    with GradingService(cpu_seconds=0.5, wall_seconds=1.0) as service:
        yield service


def pid(service: GradingService) -> int | None:
    return next((worker.process.pid for worker in list(service.pool.live.values())), None)


def attack(service: GradingService, future: Future[Verdict], number: int, pause: float) -> None:
    """Send the signal to whatever worker there is until there is a verdict."""
    while not future.done():
        target = pid(service)
        if target is not None:
            with suppress(ProcessLookupError):
                os.kill(target, number)
        sleep(pause)


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP", "SIGXCPU", "SIGPROF", "SIGINT"])
def test_one_signal_from_outside_costs_nothing(service: GradingService, name: str) -> None:
    number = getattr(signal, name)
    service.grade(*question(3 + number))
    worker = pid(service)
    assert worker is not None
    os.kill(worker, signal.SIGSTOP)
    future = service.submit(*question(100 + number))
    os.kill(worker, number)
    if number != signal.SIGSTOP:
        os.kill(worker, signal.SIGCONT)
    assert future.result(120)[:2] == ("right", "symbolic")


def test_workers_that_are_always_killed_make_unknown_verdicts_that_are_not_remembered(service: GradingService) -> None:
    service.grade(*question(303))
    worker = pid(service)
    assert worker is not None
    os.kill(worker, signal.SIGSTOP)
    future = service.submit(*question(200))
    attack(service, future, signal.SIGKILL, 0.01)
    assert future.result(0)[:2] in (("unknown", "grader"), ("right", "symbolic"))
    assert service.grade(*question(200))[:2] == ("right", "symbolic")


def test_alarms_of_somebody_else_do_not_end_a_task(service: GradingService) -> None:
    service.grade(*question(304))
    future = service.submit(*question(201))
    attack(service, future, signal.SIGPROF, 0.0)
    assert future.result(0)[:2] == ("right", "symbolic")


def test_a_stopped_worker_is_replaced_however_much_is_sent_to_it(service: GradingService) -> None:
    service.grade(*question(305))
    worker = pid(service)
    assert worker is not None
    os.kill(worker, signal.SIGSTOP)
    long = " " * 400 + "x" * 300_000
    assert service.compat("verifier_flan", long, "x" * 300_000) == 1.0


def test_a_machine_half_as_fast_gets_twice_the_seconds() -> None:
    assert allowed_seconds(3.0, PACE_SECONDS * 2) == 6.0
    assert allowed_seconds(3.0, PACE_SECONDS / 2) == 3.0
    assert allowed_seconds(3.0, PACE_SECONDS * 1000) == 24.0
