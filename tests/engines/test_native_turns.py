"""Clients who take turns: nobody waits for another's prompt, and a prompt that nobody waits for is not computed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lemma.engines.native.engine import CPU_PART, NativeEngine
from lemma.engines.native.runner import Runner
from lemma.engines.protocol import Completion, Key, NewTokens, Request, generate
from lemma.serving.engine_driver import Call, EngineDriver
from tests.engines.native_checks import FREE, check_at_rest, check_same, engine_of, requests_of, run
from tests.engines.small_policies import exact_policy, random_prompts

SHORT = Request(("short",), np.arange(1, 30), replace(FREE, max_tokens=40))
LONG = [Request(("long", i), (np.arange(200) * (i + 3)) % 250 + 1, replace(FREE, max_tokens=20)) for i in range(32)]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[dict[Key, int]]:
    """How many tokens of each request the passes over prompts computed."""
    seen: list[dict[Key, int]] = []
    prefill = Runner.prefill

    def counted(self: Runner, parts: Any) -> Any:
        seen.append({sequence.request.key: count for sequence, count in parts})
        return prefill(self, parts)

    monkeypatch.setattr(Runner, "prefill", counted)
    return seen


def turns_of(**settings: Any) -> NativeEngine:
    engine = engine_of(exact_policy(), **{"cache_tokens": 16384, **settings})
    engine.take_turns()
    return engine


def steps_to(engine: NativeEngine, key: Key, passes: list[dict[Key, int]]) -> tuple[int, list[dict[Key, int]]]:
    """Passes and bursts until the request is answered, and the passes; everything else is cancelled then."""
    steps, begin = 0, len(passes)
    while not any(completion.key == key for completion in engine.finished):
        engine.work()
        steps += 1
    until = steps, passes[begin:]
    engine.finished.clear()
    for request in LONG:
        engine.cancel(request.key)
    assert all(completion.finish == "cancelled" for completion in engine.completions())
    check_at_rest(engine)
    return until


@pytest.mark.parametrize("is_late", [False, True])
def test_a_short_request_beside_32_long_ones(is_late: bool, passes: list[dict[Key, int]]) -> None:
    """Twice its time alone, for what others compute between its bursts, and a burst, in which it came."""
    engine = turns_of()
    engine.submit(SHORT)
    alone, _ = steps_to(engine, SHORT.key, passes)
    for request in LONG:
        engine.submit(request)
    if is_late:
        next(engine.completions())
    engine.submit(SHORT)
    beside, between = steps_to(engine, SHORT.key, passes)
    assert beside <= 2 * alone + 1
    assert max(sum(parts.values()) for parts in between) <= CPU_PART
    assert sum(sum(parts.values()) for parts in between) > 5 * CPU_PART, "the long ones go on meanwhile"


def test_a_long_prompt_is_computed_beside_a_stream_of_short_ones(passes: list[dict[Key, int]]) -> None:
    engine = turns_of(share_prefixes=False)
    engine.submit(LONG[0])
    numbers = iter(range(10_000))

    while not any(completion.key == LONG[0].key for completion in engine.finished):
        engine.work()
        for _ in range(4):
            engine.submit(Request(("s", next(numbers)), SHORT.prompt, replace(FREE, max_tokens=1)))
    parts = [parts[LONG[0].key] for parts in passes if LONG[0].key in parts]
    assert sum(parts) == 200 and min(parts[:-1]) == CPU_PART // 2, "half of each pass is the oldest's"
    engine.close()


@pytest.mark.parametrize("settings", [{}, {"cache_tokens": 240}, {"max_sequences": 3}, {"prefill_tokens": 7}])
def test_turns_change_no_answer(settings: dict[str, Any]) -> None:
    """Also where sequences are preempted, in prefill too, and where samples of a prompt do not all fit."""
    requests = requests_of(random_prompts(16, seed=2, longest=90), replace(FREE, max_tokens=30), n=3)
    engine = turns_of(**settings)
    found = generate(engine, requests)
    check_at_rest(engine)
    assert engine.scheduler.preemptions > 0 or settings != {"cache_tokens": 240}
    check_same(found, run(exact_policy(), requests))


def test_what_was_cancelled_while_it_waited_is_never_computed(passes: list[dict[Key, int]]) -> None:
    """As clients see it: they go away as soon as another one has heard something."""
    engine = turns_of()
    driver = EngineDriver(engine)
    gone: list[Call] = []
    heard: list[NewTokens | Completion] = []
    begun: set[Key] = set()

    def leave(event: Any) -> None:
        heard.append(event)
        if len(heard) == 1:
            begun.update(key for parts in passes for key in parts)
            for call in gone:
                driver.drop(call)

    gone += [driver.submit([request], lambda event: None) for request in LONG]
    driver.submit([replace(SHORT, stream=True)], leave)
    driver.run(lambda: not driver.active)
    assert isinstance(heard[-1], Completion) and len(heard[-1].ids) == 40
    assert {key for parts in passes for key in parts} == begun
    assert begun == {SHORT.key, LONG[0].key, LONG[1].key}, "the oldest, and one for the tokens that were left"
    check_at_rest(engine)
