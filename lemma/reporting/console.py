"""What a user reads during a run: events as text, the same in `run.log`, and plain lines on the console. On a terminal
bars take the place of lines (bars.py)."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TextIO

from lemma.core.events import Awaited, Event, Measured, Progressed, Said, StageEnded, StageStarted
from lemma.core.terminal import unescaped

if TYPE_CHECKING:
    from lemma.reporting.bars import Bars

STYLES = {"info": "", "warning": "yellow", "error": "bold red"}
SECONDS_BETWEEN_LINES = 5.0
# Maximum seconds without a line while something is running.
LONGEST_SILENCE = 15.0
# From how many seconds on a line says what is waited for.
SECONDS_TO_WAIT = 1.0
HEADLINES = ("reward", "accuracy", "loss", "kl", "entropy", "grad_norm", "lr", "tokens_per_second", "mfu")
"""The numbers people look at first, in this order; a line about a step shows a few of them."""
REACHED = ("reward", "reward/mean", "right", "accuracy", "loss")
"""The numbers of a stage's last step that are shown at its end."""
EVALUATION = "evaluation/"
LEARNT = "learnt_"
ACCURACY = "answer_accuracy"
MOST_BENCHMARKS = 4
# How far the lenient accuracy must be above the strict one to be shown.
WORTH_SAYING = 0.02
# Anything faster is over before its rate could be read.
FASTEST = 10_000


class Console:
    """Shows a run on standard output, as bars or lines depending on what that is."""

    name = "the console"
    troubles: tuple[type[Exception], ...] = (OSError,)

    def __init__(self, stream: TextIO | None = None):
        stream = unescaped(sys.stdout if stream is None else stream)
        self._view: Bars | _Lines = _bars(stream) if stream.isatty() else _Lines(stream)
        self._stage = ""
        self._numbers: Measured | None = None
        self._last_end = ""

    def __call__(self, event: Event) -> None:
        match event:
            case Said(text) if self._last_end.endswith(f"; {text}"):
                pass  # a run ends with the path of its model, which its last stage has just shown
            case Said(text, level):
                self._view.say(text if level == "info" else f"{level}: {text}", STYLES[level])
            case StageStarted(stage, step, total):
                self._stage, self._numbers = stage, None
                self._view.say(describe(event), "bold")
                self._view.begin(stage, step, total)
            case Measured(stage, _, "train") if stage == self._stage:
                self._numbers = event
            case Measured():
                self._view.say(evaluated(event))
            case Progressed(what, done, total, note, share):
                self._view.reach(what, done, total, self._note(what, note), share)
            case Awaited(stage, what):
                self._view.wait(stage, what)
            case StageEnded(stage):
                self._view.wait(stage, "")
                self._view.end(stage)
                self._last_end = ended(event, self._numbers)
                self._view.say(self._last_end, "bold")

    def _note(self, what: str, note: str) -> str:
        """The text after a progress bar: the note, and for a stage the numbers of its last step not named in it."""
        if what != self._stage or self._numbers is None:
            return note
        return ", ".join(part for part in (note, headline(self._numbers, besides=note)) if part)

    def close(self, failed: bool) -> None:
        self._view.close()


def _bars(stream: TextIO) -> Bars:
    from lemma.reporting.bars import Bars

    return Bars(stream)


class _Lines:
    """Plain lines without control codes: progress every few seconds, its end if it was shown before, what is waited for
    if that takes longer than a moment, and a sign of life after a long silence."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._lock = threading.RLock()
        self._paces: dict[str, Pace] = {}
        self._shown: set[str] = set()
        self._last_line = time.monotonic()
        self._closed = threading.Event()
        self._watch: threading.Thread | None = None
        # Which stage waits for what, since when, and whether a line has said so.
        self._awaited: tuple[str, str, float] | None = None
        self._is_told = False

    def say(self, text: str, style: str = "") -> None:
        encoding = self._stream.encoding or "utf-8"
        with self._lock:
            self._last_line = time.monotonic()
            self._stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
            self._stream.flush()

    def begin(self, what: str, done: int, total: int) -> None:
        with self._lock:
            self._paces[what] = Pace(done, total)
            self._shown.discard(what)
            self._begin_watch()

    def _begin_watch(self) -> None:
        if self._watch is None:
            self._watch = threading.Thread(target=self._look_after, name="sign of life", daemon=True)
            self._watch.start()

    def wait(self, stage: str, what: str) -> None:
        with self._lock:
            self._awaited, self._is_told = (stage, what, time.monotonic()) if what else None, False
            if stage in self._paces:
                (self._paces[stage].pause if what else self._paces[stage].go_on)()
            self._begin_watch()

    def reach(self, what: str, done: int, total: int, note: str, share: float | None = None) -> None:
        with self._lock:
            if what not in self._paces:
                self.begin(what, done, total)
            pace = self._paces[what]
            pace.reach(done, total, share)
            finished = done >= total
            if time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES or (finished and what in self._shown):
                self._shown.add(what)
                self.say(", ".join(part for part in (f"{what}: {done:,}/{total:,}", str(pace), note) if part))
            if finished:
                self.end(what)

    def end(self, what: str) -> None:
        self._paces.pop(what, None)

    def close(self) -> None:
        self._closed.set()
        self._paces.clear()

    def _look_after(self) -> None:
        while not self._closed.wait(SECONDS_TO_WAIT / 2):
            with self._lock:
                try:
                    self._give_sign(time.monotonic())
                except (OSError, ValueError):
                    return  # the reader is gone; the next event will report it

    def _give_sign(self, now: float) -> None:
        is_silent = now - self._last_line >= LONGEST_SILENCE
        what, pace = next(reversed(self._paces.items()), ("", None))
        counted = "" if pace is None else f"{pace.done:,}/{pace.total:,}, "
        if self._awaited is not None and what in ("", self._awaited[0]):
            stage, awaited, since = self._awaited
            if is_silent and self._is_told:
                self.say(f"{stage}: {counted}{awaited} for {duration(now - since)}")
            elif not self._is_told and now - since >= SECONDS_TO_WAIT:
                self._is_told = True
                self.say(f"{stage}: {counted}{awaited}")
        elif pace is not None and is_silent:
            self._shown.add(what)
            self.say(f"{what}: {counted}running for {duration(now - pace.began)}")


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
    """The few numbers of a step that matter most and are not named in `besides`; the first numbers if it has none of
    them."""
    everything = {**event.values, **event.timings}
    chosen = [name for name in HEADLINES if name in everything] or list(event.values)
    return numbers({name: everything[name] for name in chosen[:most] if name not in besides.split()})


def duration(seconds: float) -> str:
    """Seconds in readable form: 8 s, 3 min 20 s, 2 h 5 min."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


class Pace:
    """The recent rate of progress, and how long the rest will take.

    If reports include the share of work done, that is used, since units may differ in size. Such reports are frequent
    and uneven, so they are averaged over a minute.
    """

    LEAST_SECONDS = 0.2
    SECONDS_BETWEEN_SHARES = 3.0

    def __init__(self, done: int, total: int, window: int = 20):
        self.done, self.total, self.share = done, total, done / total if total else 0.0
        self.is_by_share = False
        self.began = time.monotonic()
        # Seconds that do not count, and since when none does.
        self._idle = 0.0
        self._paused: float | None = None
        self._marks: deque[tuple[float, int, float]] = deque([(self.began, done, self.share)], maxlen=window)

    def pause(self) -> None:
        """What follows is no progress that the rate should count, until `go_on` or the next report."""
        if self._paused is None:
            self._paused = time.monotonic()

    def go_on(self) -> None:
        if self._paused is not None:
            self._idle += time.monotonic() - self._paused
            self._paused = None

    def reach(self, done: int, total: int, share: float | None = None) -> None:
        self.go_on()
        now = time.monotonic() - self._idle
        self.is_by_share = share is not None
        self.done, self.total, self.share = done, total, (done / total if total else 0.0) if share is None else share
        if len(self._marks) > 2 and self.is_by_share and now - self._marks[-2][0] < self.SECONDS_BETWEEN_SHARES:
            self._marks.pop()
        self._marks.append((now, done, self.share))

    def _rate(self, column: int) -> float:
        """Progress per second; 0 while unknown. The first unit, which includes warm-up, is left out if possible."""
        first, last = self._marks[1 if len(self._marks) > 2 else 0], self._marks[-1]
        seconds, grown = last[0] - first[0], last[column] - first[column]
        return grown / seconds if seconds >= self.LEAST_SECONDS and grown > 0 else 0.0

    @property
    def per_second(self) -> float:
        """Units per second."""
        return self._rate(1)

    @property
    def left(self) -> str:
        """How long the rest will take, as text; empty while unknown."""
        rate = self._rate(2) if self.share < 1 else 0.0
        return f"{duration((1 - self.share) / rate)} left" if rate else ""

    @property
    def speed(self) -> str:
        rate = self.per_second
        if not rate or self.is_by_share or rate > FASTEST:
            return ""
        return f"{number(round(rate, 1))}/s" if rate >= 1 else f"{1 / rate:.1f} s each"

    def __str__(self) -> str:
        return ", ".join(part for part in (self.speed, self.left) if part)


def evaluated(event: Measured) -> str:
    """An evaluation during a stage in one line: accuracies with their intervals, and numbers that explain them; mean
    rewards where no problem has a gold."""
    values = {name.removeprefix(EVALUATION): value for name, value in event.values.items()}
    measure = ACCURACY if any(name.endswith(f"/{ACCURACY}") for name in values) else "reward"
    benchmarks = [name.removesuffix(f"/{measure}") for name in values if name.endswith(f"/{measure}")]
    if not benchmarks:
        return f"{event.stage}: {event.axis} step {event.step}: {headline(event, most=6)}"
    names = ["", *benchmarks] if len(benchmarks) > 1 else benchmarks
    parts = []
    for name in names[: MOST_BENCHMARKS + 1]:
        front = f"{name}/" if name else ""
        low, high = (values.get(f"{front}{ACCURACY}_{end}") for end in ("low", "high"))
        interval = "" if low is None or high is None else f" ({100 * low:.1f} to {100 * high:.1f})"
        value = values[f"{front}{measure}"]
        shown = f"{value:.1%}{interval}" if measure == ACCURACY else f"reward {number(value)}"
        parts.append(f"{name or 'mean'} {shown}")
    if len(names) > MOST_BENCHMARKS + 1:
        parts.append(f"and {len(names) - MOST_BENCHMARKS - 1} more")
    front = "" if len(benchmarks) > 1 else f"{benchmarks[0]}/"
    others = {"format": "format_accuracy", "cut off": "truncated"}
    if values.get(f"{front}lenient_accuracy", 0.0) > values[f"{front}{measure}"] + WORTH_SAYING:
        others["lenient"] = "lenient_accuracy"
    told = [f"{word} {values[front + name]:.0%}" for word, name in others.items() if front + name in values]
    return f"{event.stage}: evaluation at step {event.step}: {', '.join(parts)}; {', '.join(told)}".removesuffix("; ")


def ended(event: StageEnded, last: Measured | None = None) -> str:
    """The result of a stage: the numbers of its last step, its summary, its duration, and the path of the model."""
    rest = dict(event.summary)
    seconds, model = rest.pop("seconds", None), rest.pop("model", None)
    reached: dict[str, Any] = {}
    if last is not None and last.stage == event.stage:
        reached = {name.removesuffix("/mean"): last.values[name] for name in REACHED if name in last.values}
        reached |= {"right": f"{reached['right']:.0%}"} if "right" in reached else {}
    took = "" if seconds is None else f" after {duration(seconds)}{' in this session' if event.resumed else ''}"
    told = numbers({**reached, **{name: value for name, value in _counted(rest).items() if name != "steps"}})
    where = "" if model is None else f"; the model is in {model}"
    return f"{event.stage}: ended at step {event.step}{took}" + (f": {told}" if told else "") + where


def _counted(summary: Mapping[str, Any]) -> dict[str, Any]:
    """If a stage reports how much it trained on, that comes before the size of its data."""
    counts = {name: value for name, value in summary.items() if not name.startswith(LEARNT)}
    for name in counts:
        if LEARNT + name in summary:
            counts[name] = f"{number(summary[LEARNT + name])} ({number(counts[name])} in the data)"
    return counts


def describe(event: Event) -> str:
    """One line about an event, with all its numbers."""
    match event:
        case Said(text):
            return text
        case StageStarted(stage, step, total, resumed):
            return (
                f"{stage}: resumes after step {step} of {total}"
                if resumed
                else f"{stage}: {total} step{'' if total == 1 else 's'}"
            )
        case Measured(stage, step, axis, values, timings, bottleneck):
            text = f"{stage}: {axis} step {step}: {numbers({**values, **timings})}"
            return f"{text}, bottleneck {bottleneck}" if bottleneck else text
        case Awaited(stage, what):
            return f"{stage}: {what}"
        case Progressed(what, done, total, note):
            return f"{what}: {done} of {total}" + (f", {note}" if note else "")
        case StageEnded():
            return ended(event)
