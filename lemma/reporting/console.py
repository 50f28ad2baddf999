"""What a user sees during a run: progress bars on a terminal, plain lines everywhere else."""

from __future__ import annotations

import sys
import threading
import time
from typing import TextIO

from rich.console import Console as Terminal
from rich.progress import Progress, ProgressColumn, Task, TaskID
from rich.text import Text

from lemma.core.events import Awaited, Event, Measured, Progressed, Said, StageEnded, StageStarted
from lemma.core.terminal import unescaped
from lemma.reporting.text import Pace, describe, duration, ended, evaluated, headline, progress_line

STYLES = {"info": "", "warning": "yellow", "error": "bold red"}
SECONDS_BETWEEN_LINES = 5.0
# Maximum seconds without a line while something is running.
LONGEST_SILENCE = 15.0
# From how many seconds on a line says what is waited for.
SECONDS_TO_WAIT = 1.0


class Console:
    """Shows a run on standard output, as bars or lines depending on what that is."""

    name = "the console"
    troubles: tuple[type[Exception], ...] = (OSError,)

    def __init__(self, stream: TextIO | None = None):
        stream = unescaped(sys.stdout if stream is None else stream)
        self._view: _Bars | _Lines = _Bars(stream) if stream.isatty() else _Lines(stream)
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


class _Line(ProgressColumn):
    """All of a task in one line that fits the terminal."""

    def __init__(self, terminal: Terminal):
        super().__init__()
        self._terminal = terminal

    def render(self, task: Task) -> Text:
        pace: Pace | None = task.fields["pace"]
        if pace is None:
            waited = f"{task.description}: {task.fields['note']}, {duration(task.elapsed or 0.0)}"
            return Text(waited, no_wrap=True, overflow="crop")
        front, bar, rest = progress_line(task.description, pace, task.fields["note"], self._terminal.width - 1)
        if not self._terminal.encoding.lower().startswith("utf"):
            bar = bar.replace("━", "#").replace("─", "-")
        return Text.assemble(front, (bar, "cyan"), rest, no_wrap=True, overflow="crop")


class _Bars:
    """Progress bars at the bottom of a terminal, with sentences scrolling by above them."""

    def __init__(self, stream: TextIO):
        terminal = Terminal(file=stream, force_terminal=True, highlight=False)
        self._progress = Progress(_Line(terminal), console=terminal, refresh_per_second=4, transient=True)
        self._bars: dict[str, tuple[TaskID, Pace]] = {}
        # What is waited for by a stage that has no bar.
        self._waiting: TaskID | None = None

    def say(self, text: str, style: str = "") -> None:
        self._progress.console.print(Text(text, style=style))

    def begin(self, what: str, done: int, total: int) -> None:
        self.end(what)
        self._progress.start()
        pace = Pace(done, total)
        self._bars[what] = self._progress.add_task(what, total=total, completed=done, pace=pace, note=""), pace

    def reach(self, what: str, done: int, total: int, note: str, share: float | None = None) -> None:
        """Update a bar, or make one; it is removed when its work is done."""
        if what not in self._bars:
            self.begin(what, done, total)
        task, pace = self._bars[what]
        pace.reach(done, total, share)
        self._progress.update(task, completed=done, total=total, note=note)
        if done >= total:
            self.end(what)

    def wait(self, stage: str, what: str) -> None:
        """Show what is waited for beside the stage's bar or, where it has none, in the place of one."""
        self._forget_waiting()
        if stage in self._bars:
            task, pace = self._bars[stage]
            (pace.pause if what else pace.go_on)()
            self._progress.update(task, note=what)
        elif what:
            self._progress.start()
            self._waiting = self._progress.add_task(stage, total=None, pace=None, note=what)

    def _forget_waiting(self) -> None:
        if self._waiting is not None:
            self._progress.remove_task(self._waiting)
            self._waiting = None
            self._rest()

    def _rest(self) -> None:
        if not self._bars and self._waiting is None:
            self._progress.stop()

    def end(self, what: str) -> None:
        if what in self._bars:
            self._progress.remove_task(self._bars.pop(what)[0])
            self._rest()

    def close(self) -> None:
        self._forget_waiting()
        for what in list(self._bars):
            self.end(what)


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
