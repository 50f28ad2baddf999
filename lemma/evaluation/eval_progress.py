"""How far an evaluation is, by tokens: finished samples say little while a thousand others are being written."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from lemma.core.events import Progressed, Sink
from lemma.engines.protocol import Engine, Key

SECONDS_BETWEEN_EVENTS = 0.2
SECONDS_OF_RATE = 30.0


class Counts(NamedTuple):
    """What some ranks have done: samples that are graded, right, their tokens; samples that are being written, their
    tokens so far; and all tokens that were heard of."""

    done: int = 0
    right: int = 0
    finished_tokens: int = 0
    running: int = 0
    running_tokens: int = 0
    heard: int = 0


class Meter:
    """Hears tokens from the engine's thread and graded samples from the reader's, and tells both as one progress,
    together with what other ranks have done.

    The whole work is estimated: samples that are finished by their length, the others by the mean of those, or by what
    they have already where that is more. Until one is finished nobody knows, and the longest allowed stands for it.
    """

    def __init__(self, total: int, longest: int, sink: Sink):
        self._total, self._longest, self._sink = total, max(longest, 1), sink
        self._lock = threading.Lock()
        self._running: dict[tuple[Key, int], int] = {}
        self._done = self._right = self._finished_tokens = 0
        self._heard: list[tuple[float, int]] = [(time.monotonic(), 0)]
        self._fresh = 0
        self._others = Counts()
        self._last = float("-inf")

    @contextmanager
    def listening(self, engine: Engine) -> Iterator[None]:
        """Hear what the engine makes, where it is one that tells and nobody else listens."""
        if not engine.streams_tokens or engine.on_tokens is not None:
            yield
            return
        engine.on_tokens = self.hear
        try:
            yield
        finally:
            engine.on_tokens = None

    def hear(self, key: Key, sample: int, ids: np.ndarray) -> None:
        if len(key) > 2 and key[-2] == "turn":  # a later turn of an episode
            key, sample = key[:-3], int(key[-3])
        with self._lock:
            self._running[key, sample] = self._running.get((key, sample), 0) + len(ids)
            self._fresh += len(ids)
            self._tell()

    def graded(self, key: Key, sample: int, tokens: int, right: bool) -> None:
        with self._lock:
            self._running.pop((key, sample), None)
            self._done += 1
            self._right += right
            self._finished_tokens += tokens
            self._tell()

    def hear_others(self, others: Sequence[Counts]) -> None:
        """What the other ranks have done until now."""
        with self._lock:
            self._others = Counts(*map(sum, zip(*others, strict=True)))
            self._tell()

    @property
    def counts(self) -> Counts:
        """What this rank has done."""
        with self._lock:
            running = sum(self._running.values())
            return Counts(self._done, self._right, self._finished_tokens, len(self._running), running, self._fresh)

    @property
    def share(self) -> float:
        """The part of the work that is done."""
        others = self._others
        done, finished = self._done + others.done, self._finished_tokens + others.finished_tokens
        mean = finished / done if done else self._longest
        running = sum(self._running.values()) + others.running_tokens
        expected = sum(max(mean, tokens) for tokens in self._running.values())
        expected += max(mean * others.running, others.running_tokens)
        waiting = max(self._total - done - len(self._running) - others.running, 0)
        whole = finished + expected + waiting * mean
        return min((finished + running) / whole, 1.0) if whole else 0.0

    def _tell(self) -> None:
        now = time.monotonic()
        done = self._done + self._others.done
        is_end = done >= self._total
        if now - self._last < SECONDS_BETWEEN_EVENTS and not is_end:
            return
        self._last = now
        self._heard.append((now, self._fresh + self._others.heard))
        while len(self._heard) > 2 and now - self._heard[1][0] > SECONDS_OF_RATE:
            self._heard.pop(0)
        self._sink(Progressed("evaluation", done, self._total, self._note(), 1.0 if is_end else self.share))

    def _note(self) -> str:
        (begin, first), (end, last) = self._heard[0], self._heard[-1]
        done, right = self._done + self._others.done, self._right + self._others.right
        parts = [f"{right / done:.1%} right"] if done else []
        if end - begin >= 1.0 and last - first >= end - begin:
            parts.append(f"{(last - first) / (end - begin):,.0f} tokens/s")
        return ", ".join(parts)
