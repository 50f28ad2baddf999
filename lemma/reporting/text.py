"""Events in words: numbers, durations, rates and one line per event, the same on the console and in `run.log`."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from lemma.core.events import Event, Measured, Progressed, Said, StageEnded, StageStarted

HEADLINES = ("loss", "reward", "accuracy", "kl", "entropy", "grad_norm", "lr", "tokens_per_second", "mfu")
"""The numbers people look at first, in this order; a line about a step shows a few of them."""


def number(value: Any) -> str:
    """A number with four significant digits; anything else as it is."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or (math.isfinite(value) and value == int(value) and abs(value) < 1e6):
        return f"{int(value):,}"
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e9 else f"{value:.4g}"


def numbers(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {number(value)}" for name, value in values.items())


def headline(event: Measured, besides: str = "", most: int = 4) -> str:
    """The few numbers of a step that matter most and that `besides` does not name already; its first ones where none
    of those is known."""
    everything = {**event.values, **event.timings}
    chosen = [name for name in HEADLINES if name in everything] or list(event.values)
    return numbers({name: everything[name] for name in chosen[:most] if name not in besides.split()})


def duration(seconds: float) -> str:
    """Seconds as people say them: 8 s, 3 min 20 s, 2 h 5 min."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


class Pace:
    """How fast something goes, over its last few reports, and how long the rest will take."""

    def __init__(self, done: int, total: int, window: int = 20):
        self.done, self.total = done, total
        self._marks: deque[tuple[float, int]] = deque([(time.monotonic(), done)], maxlen=window)

    def reach(self, done: int, total: int) -> None:
        self.done, self.total = done, total
        self._marks.append((time.monotonic(), done))

    @property
    def per_second(self) -> float:
        """Units a second; 0 while nothing is known. The first unit, which warms things up, is left out if it can be."""
        (begin, first), (end, last) = self._marks[1 if len(self._marks) > 2 else 0], self._marks[-1]
        return (last - first) / (end - begin) if end > begin and last > first else 0.0

    def __str__(self) -> str:
        rate = self.per_second
        if not rate:
            return ""
        speed = f"{number(round(rate, 1))}/s" if rate >= 1 else f"{1 / rate:.1f} s each"
        return f"{speed}, {duration((self.total - self.done) / rate)} left"


def describe(event: Event) -> str:
    """One line about an event, whole: every number that it carries."""
    match event:
        case Said(text):
            return text
        case StageStarted(stage, step, total, resumed):
            return f"{stage}: goes on after step {step} of {total}" if resumed else f"{stage}: {total} steps"
        case Measured(stage, step, axis, values, timings, held_by):
            text = f"{stage}: {axis} step {step}: {numbers({**values, **timings})}"
            return f"{text}, held back by {held_by}" if held_by else text
        case Progressed(what, done, total, note):
            return f"{what}: {done} of {total}" + (f", {note}" if note else "")
        case StageEnded(stage, step, summary):
            return f"{stage}: ended at step {step}" + (f": {numbers(summary)}" if summary else "")
