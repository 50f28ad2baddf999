"""How far an evaluation is, by tokens: finished samples say little while a thousand others are being written."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from lemma.core.events import Progressed, Sink
from lemma.core.ranks import is_leader, rank, world_size
from lemma.engines.protocol import Engine

SECONDS_BETWEEN_EVENTS = 0.2
SECONDS_OF_RATE = 30.0
# How often the engine's count of tokens is read, and the counts of other ranks.
LOOK_SECONDS = 0.5


class Counts(NamedTuple):
    """What some ranks have done: samples that are graded and right, the tokens of all graded ones, and the tokens that
    were sampled by this evaluation, unfinished samples included."""

    done: int = 0
    right: int = 0
    finished: int = 0
    sampled: int = 0


class Meter:
    """Counts graded samples, looks at the engine's tokens in a thread of its own, and reports both as one progress,
    together with what other ranks have done.

    The whole work is estimated by the mean of the finished samples. Until one is finished nobody knows, and the longest
    allowed stands for it.
    """

    def __init__(self, total: int, longest: int, sink: Sink):
        self._total, self._longest, self._sink = total, max(longest, 1), sink
        self._lock = threading.Lock()
        self._own, self._others = Counts(), Counts()
        # Tokens of samples that were there before.
        self._known = 0
        self._rates: list[tuple[float, int]] = [(time.monotonic(), 0)]
        self._last = float("-inf")

    @contextmanager
    def watching(self, engine: Engine, folder: Path) -> Iterator[None]:
        """Within `with`, count the tokens that the engine samples. Each rank leaves its counts in the folder, and the
        first adds them up."""
        ended, before = threading.Event(), engine.sampled_tokens
        paths = [folder / f".progress-{number}.json" for number in range(1, world_size())]
        self._known = self._own.finished

        def work() -> None:
            while not ended.wait(LOOK_SECONDS):
                with suppress(OSError):  # numbers for the eye are no reason to stop
                    others = [_read(path) for path in paths] if is_leader() else []
                    self.look(engine.sampled_tokens - before, others)
                    if not is_leader():
                        _write(paths[rank() - 1], self._own)

        thread = threading.Thread(target=work, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            if not is_leader():
                paths[rank() - 1].unlink(missing_ok=True)

    def look(self, sampled: int, others: Sequence[Counts] = ()) -> None:
        """So many tokens were sampled here until now; the other ranks have done this."""
        with self._lock:
            self._own = self._own._replace(sampled=sampled)
            self._others = Counts(*map(sum, zip(*others, strict=True))) if others else Counts()
            self._tell()

    def graded(self, tokens: int, right: bool) -> None:
        with self._lock:
            done, were_right, finished, sampled = self._own
            self._own = Counts(done + 1, were_right + right, finished + tokens, sampled)
            self._tell()

    @property
    def share(self) -> float:
        """The part of the work that is done."""
        done, _, finished, sampled = self._all
        mean = finished / done if done else self._longest
        running = max(sampled - (finished - self._known), 0)
        whole = finished + max((self._total - done) * mean, running)
        return min((finished + running) / whole, 1.0) if whole else 0.0

    @property
    def _all(self) -> Counts:
        return Counts(*map(sum, zip(self._own, self._others, strict=True)))

    def _tell(self) -> None:
        now, both = time.monotonic(), self._all
        is_end = both.done >= self._total
        if now - self._last < SECONDS_BETWEEN_EVENTS and not is_end:
            return
        self._last = now
        self._rates.append((now, both.sampled))
        while len(self._rates) > 2 and now - self._rates[1][0] > SECONDS_OF_RATE:
            self._rates.pop(0)
        self._sink(Progressed("evaluation", both.done, self._total, self._note(both), 1.0 if is_end else self.share))

    def _note(self, both: Counts) -> str:
        (begin, first), (end, last) = self._rates[0], self._rates[-1]
        parts = [f"{both.right / both.done:.1%} right"] if both.done else []
        if end - begin >= 1.0 and last - first >= end - begin:
            parts.append(f"{(last - first) / (end - begin):,.0f} tokens/s")
        return ", ".join(parts)


def _write(path: Path, counts: Counts) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps(counts))
    new.replace(path)


def _read(path: Path) -> Counts:
    return Counts(*json.loads(path.read_text())) if path.exists() else Counts()
