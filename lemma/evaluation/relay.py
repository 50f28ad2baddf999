"""Reading and grading completions in a thread of their own, while the engine works in the caller's.

The engine spends its time waiting for the device, which leaves the interpreter to the other thread. An engine that
says when it waits (`device_wait`) has the interpreter to itself otherwise, so that the device never waits for the
reader. Only one thread uses the engine at a time: all requests are submitted before the caller starts to generate.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from lemma.engines.protocol import Completion, Engine, EngineError, Key, Request

# How long the reader may keep the interpreter from the engine's thread, in seconds.
SWITCH_INTERVAL = 0.0005
# How long the reader holds back for an engine that does not come to wait for the device, in seconds.
PATIENCE = 0.02
# Completions that are looked at together, where so many are there.
BATCH = 64


class _Abandoned(Exception):
    """The engine's thread has gone: there are no more completions to read."""


class _Relay(Engine):
    """The engine as the reader sees it: what the caller's thread passes on has finished."""

    def __init__(self, engine: Engine, look: Callable[[Sequence[Completion]], None] | None):
        self.name, self.context, self._engine, self._look = engine.name, engine.context, engine, look
        self.finished: deque[Completion] = deque()
        self._looked_at: deque[Completion] = deque()
        self._owed = 0
        self.ready = threading.Event()
        self.passed: queue.SimpleQueue[Completion | BaseException] = queue.SimpleQueue()

    def submit(self, request: Request) -> None:
        assert not self.ready.is_set(), "all requests are submitted before the first completion is read"
        self._engine.submit(request)
        self._owed += request.n

    @property
    def is_busy(self) -> bool:
        return self._owed > 0

    def work(self) -> None:
        """Take one completion, at a moment when the engine does not need the interpreter."""
        self.ready.set()
        if not self._looked_at:
            batch = self._batch()
            if self._look is not None:
                self._hold_back()
                self._look(batch)
            self._looked_at.extend(batch)
        self._hold_back()
        self.finished.append(self._looked_at.popleft())
        self._owed -= 1

    def _hold_back(self) -> None:
        if self._engine.device_wait is not None:
            self._engine.device_wait.wait(PATIENCE)

    def _batch(self) -> list[Completion]:
        """What was passed on, as much as is there, and at least one."""
        batch: list[Completion] = []
        while not batch or (len(batch) < BATCH and not self.passed.empty()):
            item = self.passed.get()
            if not isinstance(item, BaseException):
                batch.append(item)
                continue
            if batch:
                self.passed.put(item)  # it is the last one, and for the next call
                break
            raise item
        return batch

    def cancel(self, key: Key) -> None:
        raise EngineError("an evaluation cancels nothing: its requests are another thread's")

    def update_weights(self, version: int) -> None:
        raise AssertionError("the weights stay as they are during an evaluation")

    def invalidate(self) -> None:
        raise AssertionError("the weights stay as they are during an evaluation")

    def close(self) -> None:
        raise AssertionError("the engine belongs to the caller")


def read_beside(
    engine: Engine, reader: Callable[[Engine], None], look: Callable[[Sequence[Completion]], None] | None = None
) -> None:
    """Call `reader` with an engine in a thread of its own, and generate here what it asks for; returns when both are
    done. What either raises is raised here. `look` sees completions before the reader does, several at a time."""
    relay = _Relay(engine, look)
    failed: list[BaseException] = []

    def work() -> None:
        try:
            reader(relay)
        except _Abandoned:
            pass
        except BaseException as error:  # noqa: BLE001  (raised again in the caller's thread)
            failed.append(error)
        finally:
            relay.ready.set()

    thread = threading.Thread(target=work, name="reading", daemon=True)
    with _switching_often():
        thread.start()
        try:
            relay.ready.wait()
            if not failed:
                for completion in engine.completions():
                    relay.passed.put(completion)
                    if failed:
                        break
            relay.passed.put(_Abandoned())
        except BaseException:
            relay.passed.put(_Abandoned())
            raise
        finally:
            if engine.device_wait is not None:
                engine.device_wait.set()
            thread.join()
    if failed:
        raise failed[0]


@contextmanager
def _switching_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
