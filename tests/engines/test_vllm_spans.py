"""Which version sampled which tokens of a response in vLLM, from what is known when weights are published."""

from __future__ import annotations

import numpy as np

from lemma.engines.protocol import Request, Sampling
from lemma.engines.vllm.jobs import Job, JobAnswer, finish, job_name


def job() -> Job:
    return Job("ab12-7-0", Request(("k",), np.arange(3), Sampling(max_tokens=9)), 0, [(0, 4)], 0.0)


def versions(one: Job, length: int) -> tuple[tuple[int, int], ...]:
    found = finish(one, JobAnswer([5] * length, [-1.0] * length, "stop"), None, None)
    return found.spans or ((0, found.policy_version),)


def test_spans_of_a_response() -> None:
    one = job()
    assert versions(one, 6) == ((0, 4),)
    one.start_span(2, 5)
    one.start_span(4, 6)
    assert versions(one, 6) == ((0, 4), (2, 5), (4, 6))
    assert versions(one, 4) == ((0, 4), (2, 5)), "no token came after the last update"
    assert versions(one, 2) == ((0, 4),)


def test_an_update_before_the_first_token_or_without_a_token_since_the_last() -> None:
    one = job()
    one.start_span(0, 5)
    assert versions(one, 6) == ((0, 5),)
    one.start_span(3, 6)
    one.start_span(3, 7)
    assert versions(one, 6) == ((0, 5), (3, 7))


def test_the_name_that_vllm_makes_of_a_job() -> None:
    assert job_name("cmpl-ab12-7-0-0") == job_name("cmpl-ab12-7-0-0-9f8e7d6c") == job().name
