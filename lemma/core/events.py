"""What a run tells the outside world. Training emits events to a sink that it is given; it never prints."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from lemma.core.terminal import visible

Level = Literal["info", "warning", "error"]
Axis = Literal["train", "eval"]


@dataclass(frozen=True, slots=True)
class Said:
    """A sentence for people."""

    text: str
    level: Level = "info"

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", visible(self.text))


@dataclass(frozen=True, slots=True)
class StageStarted:
    """A stage begins, or resumes, at `step` of `total`. Rows of later steps that a killed run wrote are void."""

    stage: str
    step: int
    total: int
    resumed: bool = False
    recipe: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Measured:
    """Numbers of one step, on the axis of training or of evaluation. `timings` are seconds and rates of this machine,
    kept apart because they are the only numbers that a repeated run may change; `bottleneck` names
    what cost the step most."""

    stage: str
    step: int
    axis: Axis
    values: Mapping[str, float]
    timings: Mapping[str, float] = field(default_factory=dict)
    bottleneck: str = ""


@dataclass(frozen=True, slots=True)
class Progressed:
    """`done` of `total` units of `what`; `note` is a few words or numbers next to the bar. `share` is the part of the
    work that is done, where units differ in size and it is known better than by counting them."""

    what: str
    done: int
    total: int
    note: str = ""
    share: float | None = None


@dataclass(frozen=True, slots=True)
class Awaited:
    """From here on the stage does something that takes its time and is no step, such as loading the model; nothing of
    the kind any more where `what` is empty."""

    stage: str
    what: str = ""


@dataclass(frozen=True, slots=True)
class StageEnded:
    """`seconds` of the summary are those of this session; `resumed` says that there was an earlier one."""

    stage: str
    step: int
    summary: Mapping[str, Any] = field(default_factory=dict)
    resumed: bool = False


Event = Said | StageStarted | Measured | Progressed | Awaited | StageEnded
Sink = Callable[[Event], None]


def silent(event: Event) -> None:
    """A sink that forgets everything."""


T = TypeVar("T")
Tell = Callable[[str, int, int], None]

# Seconds until anything is told, and between two tellings; items between two looks at the clock.
PATIENCE, BETWEEN, LOOK_EVERY = 0.5, 0.25, 256
_tell: Tell | None = None


@contextmanager
def telling(tell: Tell) -> Iterator[None]:
    """Within `with`, hear what work is done, how much of it, and of how much."""
    global _tell
    before, _tell = _tell, tell
    try:
        yield
    finally:
        _tell = before


def counted(items: Iterable[T], what: str, total: int, done: Callable[[], int] | None = None) -> Iterator[T]:
    """These items. Where that takes a while, tells how many are done, or what `done` says, and the end."""
    next_time, told = time.monotonic() + PATIENCE, False
    for number, item in enumerate(items):
        if number % LOOK_EVERY == 0 and _tell is not None and time.monotonic() >= next_time:
            next_time, told = time.monotonic() + BETWEEN, True
            _tell(what, min(done() if done else number, total - 1), total)
        yield item
    if told and _tell is not None:
        _tell(what, total, total)
