"""Calls of clients on one engine: each gets its own completions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from lemma.engines.protocol import Completion, NewTokens, Request
from lemma.serving.engine_driver import Call, EngineDriver
from tests.engines.native_checks import FREE, engine_of
from tests.engines.small_policies import exact_policy


def test_nobody_gets_the_answer_to_a_client_that_left_when_it_was_finished() -> None:
    """The same key is used again before the first answer was handed over."""
    driver = EngineDriver(engine_of(exact_policy()))
    first = Request(("seed", 1), np.arange(1, 9), replace(FREE, max_tokens=4))
    longer = replace(first, sampling=replace(FREE, max_tokens=9))
    calls: list[Call] = []
    heard: list[Any] = []
    count = 0

    def leave(event: Any) -> None:
        nonlocal count
        assert isinstance(event, NewTokens)
        count += len(event.ids)
        if count == 4:
            driver.drop(calls[0])
            driver.submit([longer], again)

    def again(event: Any) -> None:
        heard.append(event)
        if len(heard) < 3:
            driver.submit([longer], again)

    calls.append(driver.submit([replace(first, stream=True)], leave))
    driver.run(lambda: not driver.active)
    assert all(isinstance(event, Completion) for event in heard), heard
    assert [len(event.ids) for event in heard] == [9, 9, 9]
