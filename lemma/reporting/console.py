"""What a person sees while a run goes: progress bars on a terminal, plain lines everywhere else."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from rich.console import Console as Terminal
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text

from lemma.core.events import Event, Measured, Progressed, Said, StageEnded, StageStarted
from lemma.reporting.text import Pace, describe, headline

STYLES = {"info": "", "warning": "yellow", "error": "bold red"}
SECONDS_BETWEEN_LINES = 5.0


class Console:
    """Shows a run on standard output, in the way that output can show it."""

    name = "the console"
    troubles: tuple[type[Exception], ...] = (OSError,)

    def __init__(self, stream: TextIO | None = None):
        stream = sys.stdout if stream is None else stream
        self._view: _Bars | _Lines = _Bars(stream) if stream.isatty() else _Lines(stream)
        self._stage = ""
        self._numbers: Measured | None = None

    def __call__(self, event: Event) -> None:
        match event:
            case Said(text, level):
                self._view.say(text if level == "info" else f"{level}: {text}", STYLES[level])
            case StageStarted(stage, step, total):
                self._stage, self._numbers = stage, None
                self._view.say(describe(event), "bold")
                self._view.begin(stage, step, total)
            case Measured(stage, _, "train") if stage == self._stage:
                self._numbers = event
            case Measured():
                self._view.say(describe(event))
            case Progressed(what, done, total, note):
                self._view.reach(what, done, total, self._beside(what, note))
            case StageEnded(stage):
                self._view.end(stage)
                self._view.say(describe(event), "bold")

    def _beside(self, what: str, note: str) -> str:
        """What stands beside a bar: the note, and for a stage the numbers of its last step that it does not name."""
        if what != self._stage or self._numbers is None:
            return note
        return ", ".join(part for part in (note, headline(self._numbers, besides=note)) if part)

    def close(self, failed: bool) -> None:
        self._view.close()


class _Bars:
    """Progress bars at the bottom of a terminal, with sentences scrolling by above them."""

    def __init__(self, stream: TextIO):
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[pace]}", markup=False),
            TextColumn("{task.fields[note]}", markup=False, style="cyan"),
            console=Terminal(file=stream, force_terminal=True, highlight=False),
            refresh_per_second=4,
            transient=True,
        )
        self._bars: dict[str, tuple[TaskID, Pace]] = {}

    def say(self, text: str, style: str = "") -> None:
        self._progress.console.print(Text(text, style=style))

    def begin(self, what: str, done: int, total: int) -> None:
        self.end(what)
        if not self._bars:
            self._progress.start()
        task = self._progress.add_task(what, total=total, completed=done, pace="", note="")
        self._bars[what] = task, Pace(done, total)

    def reach(self, what: str, done: int, total: int, note: str) -> None:
        """Move a bar, or make one; it goes when its work is done."""
        if what not in self._bars:
            self.begin(what, done, total)
        task, pace = self._bars[what]
        pace.reach(done, total)
        self._progress.update(task, completed=done, total=total, pace=str(pace), note=note)
        if done >= total:
            self.end(what)

    def end(self, what: str) -> None:
        if what in self._bars:
            self._progress.remove_task(self._bars.pop(what)[0])
            if not self._bars:
                self._progress.stop()

    def close(self) -> None:
        for what in list(self._bars):
            self.end(what)


class _Lines:
    """Plain lines without control codes; progress at most once every few seconds, and always its end."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._paces: dict[str, Pace] = {}
        self._last_line = float("-inf")

    def say(self, text: str, style: str = "") -> None:
        encoding = self._stream.encoding or "utf-8"
        self._stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
        self._stream.flush()

    def begin(self, what: str, done: int, total: int) -> None:
        self._paces[what] = Pace(done, total)

    def reach(self, what: str, done: int, total: int, note: str) -> None:
        if what not in self._paces:
            self.begin(what, done, total)
        pace = self._paces[what]
        pace.reach(done, total)
        finished, now = done >= total, time.monotonic()
        if finished or now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            self.say(", ".join(part for part in (f"{what}: {done}/{total}", str(pace), note) if part))
        if finished:
            self.end(what)

    def end(self, what: str) -> None:
        self._paces.pop(what, None)

    def close(self) -> None:
        self._paces.clear()
