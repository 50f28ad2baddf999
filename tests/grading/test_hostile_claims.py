"""Answers that claim to be right are wrong, whatever they are framed in, and each gets its verdict in time."""

from __future__ import annotations

from time import perf_counter

from lemma.grading import GradingService
from tests.grading.hostile_claims import CLAIMED


def test_none_of_two_hundred_is_right_and_none_is_lost() -> None:
    assert len(set(CLAIMED)) >= 200
    taken, slow = [], []
    with GradingService(cpu_seconds=1.0) as service:
        for prediction, gold in CLAIMED:
            start = perf_counter()
            verdict = service.grade(prediction, gold)
            if verdict.kind != "wrong":
                taken.append((prediction[:120], gold, verdict))
            if perf_counter() - start > service.wall_seconds:
                slow.append(prediction[:120])
    assert taken == [] and slow == []


def test_in_one_batch_every_answer_gets_its_own_verdict() -> None:
    pairs = [pair for claim in CLAIMED for pair in (claim, ("\\boxed{" + claim[1] + "}", claim[1]))]
    with GradingService(cpu_seconds=1.0) as service:
        verdicts = service.grade_many(pairs)
    assert [v.kind for v in verdicts] == ["wrong", "right"] * len(CLAIMED)
