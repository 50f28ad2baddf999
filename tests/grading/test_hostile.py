"""Answers made to break a grader end within their limits, and the next ordinary ones are graded as before."""

from __future__ import annotations

import multiprocessing
import os
import resource
import threading
from pathlib import Path
from time import perf_counter

import pytest

from lemma.grading import GradingService
from lemma.grading.guard import Refused, check_symbolic
from tests.grading.hostile import HOSTILE

MARK = Path("/tmp/lemma_hostile_ran")


@pytest.fixture(scope="module")
def service() -> GradingService:
    return GradingService(cpu_seconds=1.0)


def _hostile(service: GradingService) -> None:
    for prediction, gold in HOSTILE:
        start = perf_counter()
        verdict = service.grade(prediction, gold)
        assert verdict.kind == "wrong" or verdict[:2] == ("unknown", "limit"), (prediction[:80], gold, verdict)
        assert perf_counter() - start < service.wall_seconds, prediction[:80]
        assert verdict.extracted is None or len(verdict.extracted) < 600


def test_each_ends_within_its_limit_and_none_is_right(service: GradingService) -> None:
    assert len(HOSTILE) >= 80
    MARK.unlink(missing_ok=True)
    service.grade(r"\sum_{k=1}^{4} k", "10")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _hostile(service)
    assert not MARK.exists(), "an answer was run as a program"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000, "memory of this process, in KiB"


def _ordinary(service: GradingService) -> None:
    pairs = [
        (f"we get \\boxed{{{n}/{n + 1}}}", f"\\frac{{{n if n % 2 else n + 1}}}{{{n + 1}}}") for n in range(2, 1000)
    ]
    pairs += [(f"\\sum_{{k=1}}^{{4}} k + {n}", str(10 + n)) for n in range(2)]
    start = perf_counter()
    verdicts = service.grade_many(pairs)
    assert [v.right for v in verdicts[:-2]] == [n % 2 == 1 for n in range(2, 1000)]
    assert all(v.right for v in verdicts[-2:])
    assert perf_counter() - start < 20


def test_the_next_thousand_answers_from_the_main_thread(service: GradingService) -> None:
    _ordinary(service)


def test_from_another_thread(service: GradingService) -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            assert service.grade(r"\boxed{\prod_{k=1}^{19999} (k^3+1)}", "1")[:2] == ("wrong", "limit")
            _hostile(service)
            _ordinary(service)
        except BaseException as error:  # noqa: BLE001  (handed to the main thread)
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(500)
    assert not thread.is_alive() and not failures, failures


def _in_child(service: GradingService) -> None:
    try:
        assert service.grade(r"\boxed{\prod_{k=1}^{19999} (k^4+1)}", "1")[:2] == ("wrong", "limit")
        _hostile(service)
        _ordinary(service)
        service.close()
    except BaseException:  # noqa: BLE001  (the exit code tells the parent)
        os._exit(1)
    os._exit(0)


def test_from_a_forked_process(service: GradingService) -> None:
    service.grade(r"\sum_{k=1}^{5} k", "15")
    child = multiprocessing.get_context("fork").Process(target=_in_child, args=(service,))
    child.start()
    child.join(500)
    assert child.exitcode == 0
    assert service.grade(r"\sum_{k=1}^{6} k", "21").right, "the parent's worker is still its own"
    service.close()


PROGRAMS = [
    "__import__('os')", "().__class__", "eval(1)", "exec(1)", "open('x')", "lambda x: x", "os.system(1)",
    "getattr(a,b)",
    "globals()", "x.__class__", "sys.exit()", "subprocess.run(1)", "compile(1)", "`ls`", "\\input{a}", "\\write18{a}",
    "\\catcode1", "\\def\\a{b}", "\\usepackage{a}", "\\begin{verbatim}a\\end{verbatim}", "'a'*10", "\"a\"", "@a", "#a",
    "a?b", "sympify(1)", "setattr(a,b)", "locals()", "import os", "a\x00b", "averyveryverylongword",
]  # fmt: skip


@pytest.mark.parametrize("text", PROGRAMS)
def test_the_allow_list_refuses_what_is_not_mathematics(text: str) -> None:
    with pytest.raises(Refused):
        check_symbolic(text)


def test_the_allow_list_lets_mathematics_through() -> None:
    for text in (
        r"\sum_{k=1}^{n} k^2",
        r"\int_0^1 x\,dx".replace(r"\,", " "),
        r"\begin{pmatrix}1&2\\3&4\end{pmatrix}^2",
    ):
        check_symbolic(text)
