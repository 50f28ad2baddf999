"""The service: killed workers are replaced, results are cached and come in order, golds at fault are unknown."""

from __future__ import annotations

import asyncio
import os
import signal
from concurrent.futures import as_completed
from time import perf_counter

import pytest

from lemma.grading import GradingService

SUM = r"\sum_{k=1}^{%d} k"


@pytest.fixture(scope="module")
def service() -> GradingService:
    return GradingService(cpu_seconds=1.0, wall_seconds=10.0)


def pid(service: GradingService) -> int:
    return next(iter(service.pool.live.values())).process.pid


def test_results_are_cached_by_gold_answer_and_rules(service: GradingService) -> None:
    first = service.grade(SUM % 7, "28")
    asked, cached = service.counts["asked"], service.counts["cached"]
    assert service.grade(f"Thus \\boxed{{{SUM % 7}}}", "28")[:2] == first[:2] == ("right", "symbolic")
    assert (service.counts["asked"], service.counts["cached"]) == (asked + 1, cached + 1)


def test_a_killed_worker_is_replaced(service: GradingService) -> None:
    service.grade(SUM % 8, "36")
    os.kill(pid(service), signal.SIGKILL)
    assert service.grade(SUM % 9, "45").right


def test_a_worker_that_hangs_is_replaced() -> None:
    with GradingService(cpu_seconds=1.0, wall_seconds=2.0) as service:
        service.grade(SUM % 3, "6")
        os.kill(pid(service), signal.SIGSTOP)
        assert service.grade(SUM % 4, "10").right, "another worker does it"
        assert (service.counts["killed"], service.counts["lost"]) == (0, 1)


def test_a_gold_that_overruns_is_unknown(service: GradingService) -> None:
    bomb = r"\prod_{k=1}^{19999} (k^2+1)"
    assert service.grade(r"\int_0^1 x dx", bomb)[:2] == ("unknown", "gold_limit")
    assert service.grade(bomb, r"\int_0^1 x dx")[:2] == ("wrong", "limit")


def test_a_comparison_that_overruns_decides_nothing() -> None:
    with GradingService(cpu_seconds=0.2) as service:
        assert service.grade(r"\sum_{n=1}^{\infty}\frac{\sin n^2}{n^{3/2}+\cos n}", "1")[:2] == ("unknown", "limit")
        assert service.grade("4", "4").right


def test_an_error_of_the_comparison_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No text is known that makes sympy raise what the worker does not expect, so the worker's answer says so here."""
    with GradingService(cpu_seconds=1.0) as service:
        with monkeypatch.context() as patch:
            patch.setattr(service.pool, "_answer", lambda worker: {"error": "ZeroDivisionError"})
            assert service.grade(SUM % 5, "16")[:2] == ("unknown", "grader")
        assert service.grade(SUM % 6, "21").right and service.counts["failed"] == 1


def test_memory_is_limited(service: GradingService) -> None:
    verdict = service.grade(r"\prod_{k=1}^{15000} (x+k)", r"\int_0^1 y dx")
    assert verdict[:2] == ("wrong", "limit")
    assert service.grade(SUM % 10, "55").right


def test_order_does_not_depend_on_timing() -> None:
    pairs = [(SUM % (n % 4 + 1), str(n)) for n in range(12)] + [(str(n), "3") for n in range(12)]
    with GradingService(workers=1) as one, GradingService(workers=2) as two:
        expected = [v[:3] for v in one.grade_many(pairs)]
        assert [v[:3] for v in two.grade_many(pairs)] == expected
        assert [v[:3] for v in two.grade_many(pairs[::-1])] == expected[::-1]
    rights = [kind == "right" for kind, _, _ in expected]
    assert rights == [(n % 4 + 1) * (n % 4 + 2) // 2 == n for n in range(12)] + [n == 3 for n in range(12)]


def test_results_stream_while_others_are_at_work(service: GradingService) -> None:
    slow = service.submit(r"\prod_{k=1}^{19999} (k^5+1)", "1")
    assert service.submit("4", "4").done(), "an exact verdict does not wait for anybody"
    later = [service.submit(SUM % n, "1") for n in (11, 12)]
    assert {future.result()[:2] for future in as_completed(later)} == {("wrong", "symbolic")}
    assert slow.result()[:2] == ("wrong", "limit")


def test_seconds_of_a_verdict_are_its_own() -> None:
    """Fifty questions to one worker: what each waits in the queue would add up to many times the whole."""
    with GradingService(workers=1) as service:
        service.grade(SUM % 5, "15")
        begin = perf_counter()
        found = [future.result() for future in [service.submit(SUM % n, "1") for n in range(20, 70)]]
        whole = perf_counter() - begin
        assert all(verdict.seconds > 0 for verdict in found) and sum(verdict.seconds for verdict in found) <= whole
        assert service.grade(SUM % 20, "1").seconds == 0, "it was known already"


def test_asynchronous_use(service: GradingService) -> None:
    async def ask() -> list[str]:
        futures = [asyncio.wrap_future(service.submit(SUM % n, "78")) for n in (12, 13)]
        return [verdict.kind for verdict in await asyncio.gather(*futures)]

    assert asyncio.run(ask()) == ["right", "wrong"]


def test_closing_finishes_what_was_asked() -> None:
    service = GradingService()
    future = service.submit(SUM % 14, "105")
    service.close()
    assert future.result(0).right


def test_workers_that_were_started_early_do_the_work() -> None:
    with GradingService(workers=2) as service:
        service.start()
        service.start()
        assert service.counts["started"] == 2
        assert service.grade(r"\boxed{\sin^2 x + \cos^2 x}", "1").kind == "right"
        assert service.counts["started"] == 2


@pytest.mark.serial
def test_closing_does_not_wait_for_a_worker_that_nobody_needed() -> None:
    service = GradingService()
    service.start()
    began = perf_counter()
    service.close()
    assert perf_counter() - began < 0.5, "a worker takes about a second to import sympy"


def test_others_do_not_wait_for_a_late_task() -> None:
    with GradingService(workers=1, cpu_seconds=30.0) as patient:
        late = patient.submit(r"\int_0^{\pi} \ln(1+\sin^3 x) dx", "7")
        others = [patient.submit(SUM % n, "1") for n in (80, 81, 82)]
        assert {future.result()[:2] for future in others} == {("wrong", "symbolic")}
        assert not late.done()
        patient._ended = True
        for worker in list(patient.pool.live.values()):
            worker.process.kill()
