"""Reading beside the engine: nothing is lost, and trouble on either side ends both."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from lemma.core.errors import UserError
from lemma.core.types import Message, Problem
from lemma.engines.protocol import Completion, Engine, Key, Request, Sampling
from lemma.evaluation.relay import BATCH, PATIENCE, read_beside
from lemma.rollouts import SampleRequest, play

PROMPT = np.array([1, 2])


class Counting(Engine):
    """An engine that answers at once, remembers which threads used it, and may fail after some answers."""

    name = "counting"
    context = 2**31

    def __init__(self, fail_after: int = 1000):
        self.finished = deque[Completion]()
        self.answered = 0
        self.asked: list[Request] = []
        self.threads: list[int] = []
        self.fail_after = fail_after

    def submit(self, request: Request) -> None:
        self.threads.append(threading.get_ident())
        self.asked.append(request)

    @property
    def is_busy(self) -> bool:
        return self.answered < len(self.asked)

    def work(self) -> None:
        if self.answered == self.fail_after:
            raise OSError("the device is gone")
        self.threads.append(threading.get_ident())
        nothing = np.zeros(0)
        self.finished.append(Completion(self.asked[self.answered].key, 0, nothing, nothing, nothing, "stop", 0))
        self.answered += 1

    def cancel(self, key: Key) -> None: ...
    def update_weights(self, version: int) -> None: ...
    def invalidate(self) -> None: ...
    def close(self) -> None: ...


class Waiting(Counting):
    """An engine that gives some answers at once, then computes, then waits for its device."""

    computes = False

    def __init__(self) -> None:
        super().__init__()
        self.device_wait: threading.Event = threading.Event()
        self.device_wait.set()

    def work(self) -> None:
        if self.answered and self.answered % 10 == 0:
            self.device_wait.clear()
            self.computes = True
            time.sleep(PATIENCE / 4)
            self.computes = False
            self.device_wait.set()
            time.sleep(PATIENCE)
        super().work()


def submit(engine: Engine, count: int) -> None:
    for number in range(count):
        engine.submit(Request((number,), PROMPT, Sampling(1)))


def test_the_engine_works_here_and_the_reader_elsewhere() -> None:
    engine, read, readers = Counting(), [], set()

    def reader(relay: Engine) -> None:
        submit(relay, 50)
        for completion in relay.completions():
            read.append(completion.key)
            readers.add(threading.get_ident())

    read_beside(engine, reader)
    assert read == [(number,) for number in range(50)]
    assert set(engine.threads[50:]) == {threading.get_ident()} and readers == set(engine.threads[:50])
    assert readers.isdisjoint(engine.threads[50:])


def test_what_is_read_was_looked_at_before_several_at_a_time() -> None:
    looked: list[Key] = []
    sizes: list[int] = []

    def look(completions: Sequence[Completion]) -> None:
        looked.extend(completion.key for completion in completions)
        sizes.append(len(completions))
        time.sleep(PATIENCE / 4)

    def reader(relay: Engine) -> None:
        submit(relay, 200)
        for number, completion in enumerate(relay.completions()):
            assert looked[number] == completion.key

    read_beside(Counting(), reader, look)
    assert len(looked) == 200 and 1 < max(sizes) <= BATCH


def test_the_reader_works_while_the_engine_waits() -> None:
    engine, disturbed = Waiting(), 0

    def reader(relay: Engine) -> None:
        nonlocal disturbed
        submit(relay, 200)
        for _ in relay.completions():
            disturbed += engine.computes

    read_beside(engine, reader)
    assert disturbed <= 20, "beside the first ten, at most one a time that was begun before"


def test_what_the_engine_gave_is_read_before_its_trouble_is_told() -> None:
    engine, read = Counting(fail_after=7), []

    def reader(relay: Engine) -> None:
        submit(relay, 20)
        read.extend(completion.key for completion in relay.completions())

    def steady(relay: Engine) -> None:
        submit(relay, 20)
        for completion in relay.completions():
            read.append(completion.key)

    with pytest.raises(OSError, match="the device is gone"):
        read_beside(engine, steady)
    assert len(read) == 7
    with pytest.raises(OSError, match="the device is gone"):
        read_beside(Counting(fail_after=0), reader)


def test_a_play_that_fails_beside_the_engine_tells_its_own_trouble() -> None:
    """It gives its requests up, which belong to the thread of the engine."""
    problem = Problem((Message("user", "how many ?"),), ("3",))

    class Failing:
        def read(self, episodes: Any) -> None:
            pass

        def begin(self, *given: Any) -> None:
            raise UserError("the reward failed")

    def reader(relay: Engine) -> None:
        judge: Any = Failing()
        for _ in play(relay, [SampleRequest(("eval", n), problem, PROMPT) for n in range(50)], Sampling(1), judge):
            pass

    with pytest.raises(UserError, match="the reward failed"):
        read_beside(Counting(), reader)


def test_trouble_of_the_reader_is_told_here() -> None:
    def before(relay: Engine) -> None:
        raise ValueError("no request")

    def between(relay: Engine) -> None:
        submit(relay, 100_000)
        for _ in relay.completions():
            raise ValueError("the disk is full")

    with pytest.raises(ValueError, match="no request"):
        read_beside(Counting(), before)
    with pytest.raises(ValueError, match="the disk is full"):
        read_beside(Counting(fail_after=200_000), between)
